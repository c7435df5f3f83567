"""Conformance of plug-ins: what every policy of a seam must do, as a list of named checks.

Each check raises AssertionError (or whatever the policy raises) with what was wrong; `run_checks` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .placement.base import Placement, PlacementProblem, place_checked
from .placement.contiguous import Contiguous
from .profile import Profile
from .recipe import Fitted, Recipe
from .schedule.base import Plan, RankStates, assign_all
from .serving import Request
from .trace import RoutingTrace

Check = Callable[["Subject"], None]


@dataclass(frozen=True, eq=False)
class Subject:
    """What a check works on: makes of the policy, a recipe around it and a training trace."""

    make: Callable[[], Any]
    recipe: Recipe
    train: RoutingTrace

    def problem(self, slots: int | None = None, seed: int = 0) -> PlacementProblem:
        r = self.recipe
        profile = Profile.fit(self.train)
        predictor = r.make_predictor()
        if predictor is not None:
            predictor.fit(profile)
        return PlacementProblem(profile, r.model, r.cluster, r.ep_size, slots or r.slots, r.home, predictor, seed)

    def placement(self, slots: int | None = None) -> Placement:
        return Contiguous().place(self.problem(slots))


@dataclass(frozen=True)
class Outcome:
    """passed None: the policy declined with a UserError, which some checks allow."""

    name: str
    passed: bool | None
    detail: str = ""


def run_checks(group: str, subject: Subject) -> list[Outcome]:
    """Run the suite of a seam; every check is run, whatever the others say."""
    outcomes = []
    for name, check in CHECKS[group].items():
        try:
            check(subject)
            outcomes.append(Outcome(name, True))
        except UserError as error:
            outcomes.append(Outcome(name, None if name in MAY_DECLINE else False, str(error)))
        except Exception as error:
            outcomes.append(Outcome(name, False, f"{type(error).__name__}: {error}"))
    return outcomes


def _same_twice(make: Callable[[], Any]) -> Any:
    first, second = make(), make()
    assert np.array_equal(first, second), "two calls with the same seed and input differ"
    return first


def places_every_expert(subject: Subject) -> None:
    place_checked(subject.make(), subject.problem())


def places_alike_for_one_seed(subject: Subject) -> None:
    _same_twice(lambda: subject.make().place(subject.problem(seed=3)).physical_to_logical_LP)


def fills_redundant_slots(subject: Subject) -> None:
    place_checked(subject.make(), subject.problem(subject.recipe.slots + 2 * subject.recipe.ep_size))


def leaves_the_profile_alone(subject: Subject) -> None:
    problem = subject.problem()
    before = problem.profile.trace.digest, problem.profile.load_LE.copy()
    subject.make().place(problem)
    again = RoutingTrace(**{f: getattr(problem.profile.trace, f) for f in problem.profile.trace.__dataclass_fields__})
    assert before[0] == again.digest and np.array_equal(before[1], problem.profile.load_LE), (
        "place() changed the profile"
    )


def _fitted_predictor(subject: Subject) -> Any:
    predictor = subject.make()
    predictor.fit(Profile.fit(subject.train))
    return predictor


def _history(subject: Subject, predictor: Any, tokens: int) -> Any:
    back = int(getattr(predictor, "lookback", 0))
    return subject.train.experts_TLk[:tokens, :back].astype(np.int16) if back else None


def scores_have_shape_and_kind(subject: Subject) -> None:
    predictor, placement = _fitted_predictor(subject), subject.placement()
    for tokens in (0, 1, 7):
        ids = subject.train.token_id_T[:tokens]
        for layer in range(placement.num_layers):
            score, confidence = predictor.scores(ids, layer, _history(subject, predictor, tokens), placement)
            assert score.shape == (tokens, placement.ep_size), f"scores of shape {score.shape} for {tokens} tokens"
            assert score.dtype == np.int32, f"scores are {score.dtype}; int32 fixed point is needed (predict.quantise)"
            assert len(confidence) == tokens and np.isfinite(confidence).all(), "confidence must be finite, one a token"


def scores_unseen_tokens(subject: Subject) -> None:
    predictor, placement = _fitted_predictor(subject), subject.placement()
    unseen = np.setdiff1d(np.arange(subject.train.vocab_size), subject.train.token_id_T)[:5].astype(np.int32)
    score, _ = predictor.scores(unseen, 0, None, placement)
    assert score.shape == (len(unseen), placement.ep_size)


def scores_alike_twice(subject: Subject) -> None:
    placement, ids = subject.placement(), subject.train.token_id_T[:50]

    def once() -> Any:
        predictor = _fitted_predictor(subject)
        return predictor.scores(ids, 1, _history(subject, predictor, 50), placement)[0]

    _same_twice(once)


def _token_cases(ranks: int) -> Iterator[tuple[Any, int]]:
    rng = np.random.default_rng(0)
    for tokens in (0, 1, 7, 64, 333):
        exact = -(-tokens // ranks)
        for capacity in (exact, exact + 3, max(tokens, 1)):
            yield rng.integers(0, 1 << 18, (tokens, ranks)).astype(np.int32), capacity
    yield np.zeros((40, ranks), dtype=np.int32), 40 // ranks + (40 % ranks > 0)


def plans_are_permutations_within_capacity(subject: Subject) -> None:
    for score, capacity in _token_cases(subject.recipe.ep_size):
        plan = subject.make().homes(score, capacity)
        tokens, ranks = score.shape
        assert isinstance(plan, Plan), f"homes() returned {type(plan).__name__}, a Plan is needed"
        assert sorted(plan.perm_T.tolist()) == list(range(tokens)), "perm is no permutation of the tokens"
        assert plan.counts_G.sum() == tokens and len(plan.counts_G) == ranks, "counts do not add up to the tokens"
        assert plan.counts_G.max(initial=0) <= capacity, f"a rank got {plan.counts_G.max()} tokens, capacity {capacity}"
        assert (plan.perm_T[plan.starts_G[plan.owner_T] + plan.slot_T] == np.arange(tokens)).all(), (
            "slot does not invert perm"
        )


def keeps_the_order_that_it_claims(subject: Subject) -> None:
    for score, capacity in _token_cases(subject.recipe.ep_size):
        scheduler = subject.make()
        if getattr(scheduler, "keeps_order", False):
            perm_T = scheduler.homes(score, capacity).perm_T
            assert np.array_equal(perm_T, np.arange(len(score))), "says keeps_order, yet permutes tokens"


def plans_alike_twice(subject: Subject) -> None:
    for score, capacity in _token_cases(subject.recipe.ep_size):
        first, second = (subject.make().homes(score, capacity).owner_T for _ in range(2))
        assert np.array_equal(first, second), "two calls with the same scores differ"


def _assigned(subject: Subject, count: int, scored: bool = True) -> NDArray[np.int64]:
    """Ranks that a fresh scheduler gives `count` requests of one window (with measured heads where it asks for them)."""
    recipe, rng = subject.recipe, np.random.default_rng(1)
    requests = [Request(i, 0.0, int(rng.integers(1, 200)), 8) for i in range(count)]
    scores = rng.integers(0, 1 << 24, (count, recipe.ep_size))
    zero = np.zeros(recipe.ep_size, dtype=np.int64)
    placement = subject.placement()
    fitted = Fitted(Profile.fit(subject.train), None, placement)
    scheduler: Any = with_policy(recipe, "request_scheduler", subject.make).request_scheduler(fitted)
    experts = (placement.num_layers, placement.num_experts)
    heads = None
    if getattr(scheduler, "needs_head", False) or getattr(scheduler, "sees_routes", False):
        heads = [rng.integers(0, 9, experts) for _ in requests]
    states = RankStates(zero, zero, zero, zero, 1 << 30)
    return np.array(assign_all(scheduler, requests, scores if scored else None, states, heads))


def assigns_ranks_that_exist(subject: Subject) -> None:
    for count in (1, 5, 40):
        assert len(_assigned(subject, count)) == count


def assigns_without_scores(subject: Subject) -> None:
    _assigned(subject, 6, scored=False)


def assigns_alike_twice(subject: Subject) -> None:
    _same_twice(lambda: _assigned(subject, 30))


def leaves_no_rank_idle(subject: Subject) -> None:
    count = 40 * subject.recipe.ep_size
    used = np.bincount(_assigned(subject, count), minlength=subject.recipe.ep_size)
    assert used.min() > 0, f"of {count} requests, rank {int(used.argmin())} got none (requests a rank: {used.tolist()})"


def slots_hold_the_expert(subject: Subject) -> None:
    placement = subject.placement(subject.recipe.slots + 2 * subject.recipe.ep_size)
    experts = subject.train.experts_TLk[:60, 0]
    for homes in (np.arange(60) % placement.ep_size, np.full(60, -1)):
        slots, again = (np.asarray(subject.make().slots(experts, homes, placement, 0)) for _ in range(2))
        assert np.array_equal(slots, again), "two calls with the same input differ"
        assert slots.shape == experts.shape, f"slots of shape {slots.shape} for experts of shape {experts.shape}"
        assert np.array_equal(placement.physical_to_logical_LP[0, slots], experts), "a slot does not hold its expert"
    empty = subject.make().slots(experts[:0], np.zeros(0, dtype=np.int64), placement, 0)
    assert np.asarray(empty).shape == (0, experts.shape[1]), "zero tokens must give zero rows"


MAY_DECLINE = {"fills redundant slots", "assigns without scores"}


def tables_say_what_scores_say(subject: Subject) -> None:
    """Of a predictor that has tables, for ranks that plan on the device."""
    predictor, placement, tokens = _fitted_predictor(subject), subject.placement(), 50
    if not hasattr(predictor, "tables"):
        return
    trace, ids = subject.train, subject.train.token_id_T[:tokens]
    slots_Tk, row_T = np.zeros((tokens, trace.top_k), dtype=np.int64), np.zeros(tokens, dtype=np.int64)
    back = int(getattr(predictor, "lookback", 0))
    for layer in range(placement.num_layers):
        history = np.full((tokens, back, trace.top_k), -1, dtype=np.int16) if back else None
        for b in range(min(back, layer)):
            history[:, b] = trace.experts_TLk[:tokens, layer - 1 - b]  # type: ignore[index]
        expected, _ = predictor.scores(ids, layer, history, placement)
        score, row_T = predictor.tables(layer, placement).scores(ids, slots_Tk, row_T)
        assert np.array_equal(score, expected), f"layer {layer}: tables give other scores than scores(...)"
        slots_Tk = placement.first_slot_LE[layer][trace.experts_TLk[:tokens, layer]]


CHECKS: dict[str, dict[str, Check]] = {
    "placement": {
        "places every expert of every layer": places_every_expert,
        "same seed, same placement": places_alike_for_one_seed,
        "fills redundant slots": fills_redundant_slots,
        "leaves the profile alone": leaves_the_profile_alone,
    },
    "predictor": {
        "scores have shape and kind": scores_have_shape_and_kind,
        "scores unseen tokens": scores_unseen_tokens,
        "same input, same scores": scores_alike_twice,
        "tables, where there are any, say what scores say": tables_say_what_scores_say,
    },
    "token_scheduler": {
        "plans are permutations within capacity": plans_are_permutations_within_capacity,
        "keeps the order where it says so": keeps_the_order_that_it_claims,
        "same input, same plan": plans_alike_twice,
    },
    "request_scheduler": {
        "assigns ranks that exist": assigns_ranks_that_exist,
        "assigns without scores": assigns_without_scores,
        "same input, same ranks": assigns_alike_twice,
        "leaves no rank idle": leaves_no_rank_idle,
    },
    "replica_router": {"slots hold the expert": slots_hold_the_expert},
}


def with_policy(recipe: Recipe, group: str, make: Callable[[], Any]) -> Recipe:
    """The recipe with one of its policies replaced."""
    changed: dict[str, Any] = {f"make_{group}": make}
    return replace(recipe, **changed)


def figures(recipe: Recipe, train: RoutingTrace, heldout: RoutingTrace, batch_tokens: int) -> dict[str, float]:
    """Held-out LAR, fan-out and imbalances of a recipe."""
    fitted: Fitted = recipe.fit(train)
    columns = recipe.locality(fitted, heldout, batch_tokens).columns()
    return {name: columns[name] for name in ("lar", "fan_out", "imbalance_step", "imbalance_total", "home_imbalance")}
