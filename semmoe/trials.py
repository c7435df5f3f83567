"""Trials: one combination of policies on unseen requests, for the table of `semmoe evaluate policies`.

Attention-TP: k folds by request; the placement and the predictor learn from the other folds, and batches of 512 tokens
shuffled over the requests of the fold are planned. Attention-DP: seeded halves; every request is re-homed once, after
its head: the first `head_tokens` tokens run where round robin put the request, their experts are counted, and the
request scheduler then places it for good, `window` requests at a time, in several arrival orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import conf_dir, group_options
from .dispatch import DispatchSpec
from .errors import UserError, nearest
from .heads import Heads
from .placement.base import Placement, PlacementProblem, check_divisible
from .plugins import instantiate
from .profile import Profile
from .recipe import Fitted, Recipe
from .specs import ClusterSpec, ModelSpec
from .trace import RoutingTrace
from .traffic.locality import LocalityMeter

Options = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """One option of a config group with changed parameters: Policy("semantic", {"load_weight": 0})."""

    name: str
    changes: Options = field(default_factory=dict, hash=False)

    @property
    def label(self) -> str:
        return self.name + "".join(f" {key}={value:g}" for key, value in self.changes.items())

    def make(self, group: str) -> Any:
        return instantiate(option(group, self.name) | self.changes, group)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A row of the table. `placed_for`: the predictor that the placement is optimised for (default: the one online).
    extra_slots a rank; window, head_tokens, orders: attention-DP only (window 0: all requests at once)."""

    flow: str
    placement: Policy
    predictor: Policy = Policy("none")
    scheduler: Policy
    placed_for: Policy | None = None
    extra_slots: int = 0
    head_tokens: int = 64
    window: int = 0
    orders: int = 1
    home_cap: float = 1.1


def option(group: str, name: str) -> Options:
    """The parameters that conf/GROUP/NAME.yaml holds, without the number of slots (which the trial says)."""
    from omegaconf import OmegaConf

    file = conf_dir() / group / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"{group}={name}: no such option{nearest(name, group_options(group))}")
    loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items() if key != "slots"}


class Bench:
    """Runs trials on one trace and EP size. Placements and predictors are fitted once per fold and shared by trials.

    fits: profiles and predictors of a bench of the same trace and folds at another EP size, which they do not depend on.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        model: ModelSpec,
        cluster: ClusterSpec,
        ep_size: int,
        folds: int = 5,
        halves: int = 10,
        batch_tokens: int = 512,
        time_limit_s: float = 60.0,
        seed: int = 0,
        fits: dict[Any, Any] | None = None,
    ) -> None:
        check_divisible(model.num_experts, model.num_experts, ep_size)
        self.trace, self.model, self.cluster, self.ep_size = trace, model, cluster, ep_size
        self.batch_tokens, self.time_limit_s, self.seed = batch_tokens, time_limit_s, seed
        self.parts = {
            "tp_shuffled": Profile.fit(trace).folds(folds, seed),
            "dp": [trace.split(0.5, seed + half) for half in range(halves)],
        }
        self._cache: dict[Any, Any] = {}
        self._fits = {} if fits is None else fits

    def run(self, trial: Trial, progress: Callable[[], None] = lambda: None) -> dict[str, NDArray[np.float64]]:
        """Column name -> one value a fold (TP) or half (DP)."""
        return _once(self._cache, ("figures", trial), lambda: self._run(trial, progress))

    def _run(self, trial: Trial, progress: Callable[[], None]) -> dict[str, NDArray[np.float64]]:
        rows = []
        for part in range(len(self.parts[trial.flow])):
            rows.append(self._tp(trial, part) if trial.flow == "tp_shuffled" else self._dp(trial, part))
            progress()
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def recipe(self, trial: Trial) -> Recipe:
        shuffled = trial.flow == "tp_shuffled"
        predictor = trial.predictor.make("predictor") if shuffled else None
        spec = DispatchSpec(
            flow=trial.flow,
            dispatcher="a2a_dedup",
            hidden=self.model.hidden,
            top_k=self.model.top_k,
            carry_expert_ids=getattr(predictor, "lookback", 0) > 0,
        )
        return Recipe(
            model=self.model,
            cluster=self.cluster,
            spec=spec,
            ep_size=self.ep_size,
            slots=self._slots(trial),
            make_placement=partial(trial.placement.make, "placement"),
            make_predictor=partial(trial.predictor.make, "predictor"),
            make_request_scheduler=partial(trial.scheduler.make, "request_scheduler"),
            make_token_scheduler=partial(trial.scheduler.make, "token_scheduler"),
            make_replica_router=partial(Policy("least_loaded").make, "replica_router"),
            home_cap=trial.home_cap,
            seed=self.seed,
            time_limit_s=self.time_limit_s,
        )

    def fitted(self, trial: Trial, part: int) -> tuple[Fitted, float]:
        """(what the trial's policies learned from the training side of this part, CPU seconds of the placement)."""
        train, _ = self.parts[trial.flow][part]
        placed_for = trial.placed_for or trial.predictor
        predictor = self._predictor(trial.flow, part, trial.predictor)
        placement, seconds = self._placement(trial, part, placed_for)
        return Fitted(Profile.fit(train), predictor, placement), seconds

    def _slots(self, trial: Trial) -> int:
        return -(-self.model.num_experts // self.ep_size + -trial.extra_slots) * self.ep_size

    def _profile(self, flow: str, part: int) -> Profile:
        return _once(self._fits, ("profile", flow, part), lambda: Profile.fit(self.parts[flow][part][0]))

    def _predictor(self, flow: str, part: int, policy: Policy) -> Any:
        def make() -> Any:
            predictor = policy.make("predictor")
            if predictor is not None:
                predictor.fit(self._profile(flow, part))
            return predictor

        return _once(self._fits, ("predictor", flow, part, policy.label), make)

    def _placement(self, trial: Trial, part: int, placed_for: Policy) -> tuple[Placement, float]:
        flow = trial.flow

        def make() -> tuple[Placement, float]:
            problem = PlacementProblem(
                self._profile(flow, part),
                self.model,
                self.cluster,
                self.ep_size,
                self._slots(trial),
                "request" if flow == "dp" else "token",
                self._predictor(flow, part, placed_for),
                self.seed,
                self.time_limit_s,
            )
            start = time.process_time()  # all threads; other work on the machine does not count
            placement = trial.placement.make("placement").place(problem)
            return placement, time.process_time() - start

        key = ("placement", flow, part, trial.placement.label, placed_for.label, trial.extra_slots)
        return _once(self._cache, key, make)

    def _tp(self, trial: Trial, part: int) -> dict[str, float]:
        recipe = self.recipe(trial)
        fitted, seconds = self.fitted(trial, part)
        test = self.parts[trial.flow][part][1]
        start = time.perf_counter()
        meter = recipe.locality(fitted, test, self.batch_tokens)
        planning_ms = (time.perf_counter() - start) * 1e3 / (meter.steps * test.num_layers)
        return _figures(meter) | {"placement_s": seconds, "planning_ms": planning_ms}

    def _dp(self, trial: Trial, part: int) -> dict[str, float]:
        """Mean over arrival orders. after_head_lar counts the tokens behind the head alone."""
        recipe = self.recipe(trial)
        fitted, seconds = self.fitted(trial, part)
        test = self.parts["dp"][part][1]
        rows = []
        for order in range(trial.orders):
            order_R = np.random.default_rng([self.seed, part, order]).permutation(test.num_requests)
            ordered = test.select(order_R)
            start = time.perf_counter()
            rank_R = recipe.request_ranks(fitted, ordered, trial.head_tokens, trial.window)
            planning_ms = (time.perf_counter() - start) * 1e3
            rows.append(self._served(trial, recipe, fitted, ordered, rank_R) | {"planning_ms": planning_ms})
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} | {"placement_s": seconds}

    def _served(
        self, trial: Trial, recipe: Recipe, fitted: Fitted, trace: RoutingTrace, rank_R: NDArray[np.int64]
    ) -> dict[str, float]:
        heads = Heads(trace, rank_R, self.ep_size, trial.head_tokens)
        rows_T = np.random.default_rng(self.seed).permutation(trace.num_tokens)
        whole, behind = (
            recipe.metered(fitted, trace, chunks(rows, self.batch_tokens), heads.home_T)
            for rows in (rows_T, rows_T[~heads.inside_T[rows_T]])
        )
        kv_bytes = heads.kv_moves_M3[:, 2].sum() * self.model.kv_bytes_per_token
        return _figures(whole) | {
            "after_head_lar": _figures(behind)["lar"],
            "kv_bytes_per_token": float(kv_bytes) / trace.num_tokens,
        }


def _once(cache: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in cache:
        cache[key] = make()
    return cache[key]


def chunks(rows_T: NDArray[np.int64], batch_tokens: int) -> Iterator[NDArray[np.int64]]:
    """All rows in batches, the last one shorter."""
    return (rows_T[begin : begin + batch_tokens] for begin in range(0, len(rows_T), batch_tokens))


def _figures(meter: LocalityMeter) -> dict[str, float]:
    columns = meter.columns()
    kept = {name: columns[name] for name in ("lar", "fan_out", "imbalance_total", "imbalance_step", "home_imbalance")}
    payload = meter.node_bytes + meter.nic_bytes
    return kept | {"bytes_per_token": payload / max(meter.tokens, 1)}


def paired(trial: Trial, **changes: Any) -> Trial:
    """The same trial with other policies on the same placement (optimised for the first trial's predictor)."""
    return replace(trial, **({"placed_for": trial.placed_for or trial.predictor} | changes))
