"""The cross-entropy sampler against enumeration of the paper's 0-1 program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_problems import problem

from semmoe.errors import UserError
from semmoe.placement.enumeration import placements
from semmoe.placement.random import Random
from semmoe.placement.sem_moe_sampler import SemMoeSampler, answered, drawn, relabelled
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=6, prompt_len=30, output_len=0, num_experts=8, top_k=2, layers=2, groups=4, topics=4).make()


def instance(seed: int, items: int = 6, experts: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    mass = rng.gamma(0.4, 10.0, (1, items, experts))
    share = rng.integers(5, 15, items).astype(float)
    return mass / mass.sum(), share / share.sum()


def optimum(mass_UE: np.ndarray, share_U: np.ndarray, ranks: int, theta: float) -> float:
    items, experts = mass_UE.shape
    homes = np.array(list(itertools.product(range(ranks), repeat=items)))
    load = np.stack([(homes == g) @ share_U for g in range(ranks)], axis=1)
    uneven, best = np.abs(load - 1 / ranks).sum(axis=1), np.inf
    for way in placements(experts, ranks, False):
        score = mass_UE @ (way[:, None] == np.arange(ranks)).astype(float)
        local = score[np.arange(items), homes].sum(axis=1)
        best = min(best, float((theta * uneven + (1 - theta) * (1 - local)).min()))
    return best


def test_within_a_percent_of_its_own_optimum_on_20_cases_and_drawing_alone_is_not() -> None:
    worse = 0
    for seed in range(20):
        mass, share = instance(seed)
        best = optimum(mass[0], share, 3, 0.5)
        value, rank_LE, home_U, _ = SemMoeSampler().solve(mass, share, 3, 0, 10.0)
        assert (np.bincount(rank_LE[0]) == 2).all() and home_U.max() < 3
        assert best - 1e-9 <= value <= 1.01 * best
        first = answered(mass, share, drawn(np.full((1, 6, 3), 1 / 3), 1, seed), 3, 0.5)[0][0]
        worse += first > 1.01 * best
    assert worse > 0


@pytest.mark.parametrize("home", ["token", "request"])
def test_beats_random_on_its_objective_fills_slots_and_reproduces(home: str) -> None:
    for ranks, slots in ((4, 8), (4, 12), (3, 9)):
        one, two = (SemMoeSampler(rounds=6).place(problem(TRACE, ranks, slots, home=home, seed=4)) for _ in range(2))
        assert np.array_equal(one.physical_to_logical_LP, two.physical_to_logical_LP)
    given = problem(TRACE, 4, home=home)
    profile = given.profile
    counts = profile.request_counts_RE if home == "request" else profile.token_counts_UE
    share = (profile.trace.length_R if home == "request" else profile.token_count_U) / profile.trace.num_tokens
    mass = np.stack([counts(layer) for layer in range(2)]).astype(float)
    chance = Random().place(given).rank_mask_LEG.argmax(axis=2)
    parts = [slice(0, 2)] if home == "request" else [slice(0, 1), slice(1, 2)]
    random = [answered(mass[p] / mass[p].sum(), share, chance[None, p], 4, 0.5)[0][0] for p in parts]
    assert SemMoeSampler().place(given).notes["objective"] < np.mean(random)


def test_draws_follow_the_probabilities_and_keep_the_sizes() -> None:
    sure = np.zeros((2, 8, 4))
    sure[:, np.arange(8), [3, 3, 2, 2, 1, 1, 0, 0]] = 1.0
    assert (drawn(sure, 5, 0) == [3, 3, 2, 2, 1, 1, 0, 0]).all()
    loose = drawn(np.full((1, 8, 4), 0.25), 50, 1)
    assert all((np.bincount(one) == 2).all() for one in loose[:, 0])
    assert len({tuple(one) for one in loose[:, 0]}) > 40


def test_relabelling_by_hand() -> None:
    leader = np.array([[0, 0, 1, 1, 2, 2]])
    assert relabelled(np.array([[2, 2, 0, 0, 1, 1]]), leader, 3).tolist() == leader.tolist()


def test_the_time_limit_ends_the_rounds() -> None:
    placed = SemMoeSampler(rounds=500).place(problem(TRACE, 4, time_limit_s=1e-3))
    assert placed.notes["rounds"] < 500


def test_bad_parameters() -> None:
    with pytest.raises(UserError, match=r"placement\.theta=2"):
        SemMoeSampler(theta=2)
    with pytest.raises(UserError, match=r"placement\.draws=0"):
        SemMoeSampler(draws=0)
