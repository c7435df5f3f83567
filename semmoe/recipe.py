"""Recipe: the policies of one configuration, fitted on any training part and evaluated on any other.

The run fits it once on the training split; the planned figures fit it again on folds inside the training split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dispatch import DispatchSpec
from .locality import LocalityMeter
from .placement.base import Placement, PlacementPolicy, PlacementProblem
from .planning import ReplicaRouter, StepPlanner
from .profile import Profile
from .schedule.base import RankStates, RequestScheduler, TokenScheduler, assign_all
from .serving import Request
from .specs import ClusterSpec, ModelSpec
from .trace import RoutingTrace
from .traffic import count_traffic
from .workload import batches

PLANNED_ORDERS = 8


@dataclass(frozen=True, eq=False)
class Fitted:
    """What a recipe learned from one training part."""

    profile: Profile
    predictor: Any
    placement: Placement

    def request_scores_G(self, token_ids_T: NDArray[np.integer]) -> NDArray[np.int64] | None:
        """Expected local assignments of a request with these (prompt) tokens on each rank, over all layers."""
        if self.predictor is None:
            return None
        whole = getattr(self.predictor, "request_scores", None)
        if whole is not None:
            return np.asarray(whole(token_ids_T, self.placement), dtype=np.int64)
        layers = range(self.placement.num_layers)
        per_layer = [self.predictor.scores(token_ids_T, layer, None, self.placement)[0] for layer in layers]
        return np.sum([score.sum(axis=0, dtype=np.int64) for score in per_layer], axis=0)


@dataclass(frozen=True, eq=False)
class Recipe:
    """Policies and shapes of one configuration. `make_*` build a fresh policy each time: schedulers may hold state."""

    model: ModelSpec
    cluster: ClusterSpec
    spec: DispatchSpec
    ep_size: int
    slots: int
    make_placement: Callable[[], PlacementPolicy]
    make_predictor: Callable[[], Any]
    make_request_scheduler: Callable[[], RequestScheduler]
    make_token_scheduler: Callable[[], TokenScheduler]
    make_replica_router: Callable[[], ReplicaRouter]
    home_cap: float = 1.1
    seed: int = 0
    time_limit_s: float = 60.0

    @property
    def home(self) -> str:
        """What shares one home: a request over all layers (dp) or a token per layer (attention-TP)."""
        return "request" if self.spec.flow == "dp" else "token"

    def fit(self, train: RoutingTrace) -> Fitted:
        """Fit predictor and placement on a training part."""
        profile = Profile.fit(train)
        predictor = self.make_predictor()
        if predictor is not None:
            predictor.fit(profile)
        problem = PlacementProblem(
            profile,
            self.model,
            self.cluster,
            self.ep_size,
            self.slots,
            self.home,
            predictor,
            self.seed,
            self.time_limit_s,
        )
        return Fitted(profile, predictor, self.make_placement().place(problem))

    def planner(self, fitted: Fitted, trace: RoutingTrace) -> StepPlanner:
        """Plans steps over rows of `trace`."""
        shuffled = self.spec.flow == "tp_shuffled"
        return StepPlanner(
            trace,
            fitted.placement,
            self.spec,
            token_scheduler=self.make_token_scheduler() if shuffled else None,
            predictor=fitted.predictor if shuffled else None,
            replica_router=self.make_replica_router() if fitted.placement.has_replicas else None,
            home_cap=self.home_cap,
        )

    def request_ranks(self, fitted: Fitted, trace: RoutingTrace) -> NDArray[np.int64]:
        """Rank of every request of `trace`, as the request scheduler assigns them in order from an idle cluster."""
        requests = [Request(r, 0.0, max(int(p), 1), 1) for r, p in enumerate(trace.prompt_len_R)]
        idle = np.zeros(self.ep_size, dtype=np.int64)
        states = RankStates(idle, idle, idle, idle, kv_capacity=1 << 40)
        scores = [fitted.request_scores_G(prompt_tokens(trace, r)) for r in range(trace.num_requests)]
        stacked = None if scores[0] is None else np.stack([s for s in scores if s is not None])
        return np.array(assign_all(self.make_request_scheduler(), requests, stacked, states), dtype=np.int64)

    def locality(
        self,
        fitted: Fitted,
        trace: RoutingTrace,
        batch_tokens: int,
        composition: str = "shuffled",
        max_batches: int | None = None,
    ) -> LocalityMeter:
        """LAR, fan-out, imbalance and bytes of `trace` in batches."""
        planner = self.planner(fitted, trace)
        rank_R = self.request_ranks(fitted, trace) if self.spec.flow == "dp" else None
        meter = LocalityMeter(trace.num_layers, self.ep_size, self.cluster.ranks_per_node)
        for rows_T in batches(trace, batch_tokens, composition, max_batches, self.seed):
            routed = planner.route(rows_T, None if rank_R is None else rank_R[trace.request_T[rows_T]])
            meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, self.slots, self.ep_size, self.spec))
        return meter

    def planned(
        self, train: RoutingTrace, batch_tokens: int, composition: str = "shuffled", folds: int = 4
    ) -> dict[str, float]:
        """lar, fan_out and bytes_per_token expected on unseen requests, from the training part alone.

        Each of `folds` parts of the training requests is evaluated with policies fitted on the others; in attention-DP
        in several orders, because a request's home depends on when it comes and nobody knows the order beforehand.
        """
        meters = []
        for part, (fit, check) in enumerate(Profile.fit(train).folds(folds, self.seed)):
            fitted = self.fit(fit)
            for order in range(PLANNED_ORDERS if self.home == "request" else 1):
                shuffled_R = np.random.default_rng([self.seed, part, order]).permutation(check.num_requests)
                meters.append(self.locality(fitted, check.select(shuffled_R), batch_tokens, composition))
        tokens = np.array([meter.tokens for meter in meters], dtype=float)
        columns = [meter.columns() for meter in meters]
        figures = {name: float(np.average([c[name] for c in columns], weights=tokens)) for name in ("lar", "fan_out")}
        payload = sum(meter.node_bytes + meter.nic_bytes for meter in meters)
        return figures | {"bytes_per_token": payload / tokens.sum()}


def prompt_tokens(trace: RoutingTrace, request: int) -> NDArray[np.integer]:
    """Token ids that are known when the request arrives: its prompt (its first token where none is marked)."""
    start = int(trace.request_offset_R1[request])
    return trace.token_id_T[start : start + max(int(trace.prompt_len_R[request]), 1)]
