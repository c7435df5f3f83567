"""Recipe: the policies of one configuration, fitted on any training part and evaluated on any other.

The run fits it once on the training split; the planned figures fit it again on folds inside the training split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dispatch import DispatchSpec
from .placement.base import Placement, PlacementPolicy, PlacementProblem, place_checked
from .planning import ReplicaRouter, StepPlanner
from .predict.base import FIXED_POINT
from .profile import Profile
from .schedule.base import RankStates, RequestScheduler, TokenScheduler, assign_all
from .serving import Request
from .serving.workload import batches
from .specs import ClusterSpec, ModelSpec
from .trace import RoutingTrace
from .traffic import count_traffic
from .traffic.locality import LocalityMeter
from .traffic.wiring import Wiring

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
        if getattr(self.predictor, "sees_routes", False):
            return None  # there are no routes before the request ran; an oracle request scheduler gets them itself
        layers = range(self.placement.num_layers)
        per_layer = [self.predictor.scores(token_ids_T, layer, None, self.placement)[0] for layer in layers]
        return np.sum([score.sum(axis=0, dtype=np.int64) for score in per_layer], axis=0)

    def measured_scores_G(self, counts_LE: NDArray[np.integer]) -> NDArray[np.int64]:
        """The same scores (16 fractional bits) from experts that were measured."""
        held_LEG = self.placement.rank_mask_LEG
        return np.einsum("le,leg->g", counts_LE.astype(np.int64), held_LEG.astype(np.int64)) * FIXED_POINT


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

    @cached_property
    def wiring(self) -> Wiring:
        return Wiring.of(self.cluster, self.ep_size)

    @property
    def home(self) -> str:
        """What shares one home: a request over all layers (dp) or a token per layer (attention-TP)."""
        return "request" if self.spec.flow == "dp" else "token"

    def fit(self, train: RoutingTrace) -> Fitted:
        """Fit predictor and placement on a training part."""
        profile = Profile.fit(train)
        predictor = self.fit_predictor(profile)
        return Fitted(profile, predictor, self.place(profile, predictor))

    def fit_predictor(self, profile: Profile) -> Any:
        """The predictor, fitted; None where there is none."""
        predictor = self.make_predictor()
        if predictor is not None:
            predictor.fit(profile)
        return predictor

    def place(self, profile: Profile, predictor: Any) -> Placement:
        """What the placement policy makes of a profile and a fitted predictor."""
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
        return place_checked(self.make_placement(), problem)

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

    def request_scheduler(self, fitted: Fitted) -> RequestScheduler:
        """A fresh request scheduler, fitted where it learns."""
        scheduler = self.make_request_scheduler()
        learn(scheduler, fitted)
        return scheduler

    def request_ranks(
        self, fitted: Fitted, trace: RoutingTrace, head_tokens: int = 0, window: int = 0
    ) -> NDArray[np.int64]:
        """Rank of every request of `trace`, as the request scheduler assigns them in order from an idle cluster.

        head_tokens: length of the head whose experts were measured before the assignment (0: none, unless the
        scheduler asks for one; then the prompt's). window: requests that wait together; 0: all. Requests stay.
        """
        scheduler = self.request_scheduler(fitted)
        requests = [Request(r, 0.0, max(int(p), 1), 1) for r, p in enumerate(trace.prompt_len_R)]
        idle = np.zeros(self.ep_size, dtype=np.int64)
        states = RankStates(idle, idle, idle, idle, kv_capacity=1 << 40)
        known = [self.known_of(fitted, scheduler, trace, r, head_tokens) for r in range(trace.num_requests)]
        heads = None if known[0][1] is None else [counts_LE for _, counts_LE in known if counts_LE is not None]
        stacked = None if known[0][0] is None else np.stack([score_G for score_G, _ in known if score_G is not None])
        rank_R = np.empty(len(requests), dtype=np.int64)
        size = window or len(requests)
        for begin in range(0, len(requests), size):
            part = slice(begin, begin + size)
            scores = None if stacked is None else stacked[part]
            rank_R[part] = assign_all(scheduler, requests[part], scores, states, heads and heads[part])
            states = states.with_assigned(requests[part], rank_R[part])
        return rank_R

    def known_of(
        self, fitted: Fitted, scheduler: Any, trace: RoutingTrace, request: int, head_tokens: int = 0
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
        """(score_G, head counts_LE) that are known of a request when it is assigned; None where nothing is."""
        start, end = (int(x) for x in trace.request_offset_R1[request : request + 2])
        prompt = max(int(trace.prompt_len_R[request]), 1)
        if getattr(scheduler, "sees_routes", False):
            head_tokens = end - start
        elif getattr(scheduler, "needs_head", False):
            head_tokens = head_tokens or prompt
        if not head_tokens:
            return fitted.request_scores_G(prompt_tokens(trace, request)), None
        counts_LE = count_layers(trace.experts_TLk[start : min(start + head_tokens, end)], trace.num_experts)
        return fitted.measured_scores_G(counts_LE), counts_LE

    def locality(
        self,
        fitted: Fitted,
        trace: RoutingTrace,
        batch_tokens: int,
        composition: str = "shuffled",
        max_batches: int | None = None,
        head_tokens: int = 0,
    ) -> LocalityMeter:
        """LAR, fan-out, imbalance and bytes of `trace` in batches. head_tokens: see request_ranks (flow dp)."""
        home_T = self.request_ranks(fitted, trace, head_tokens)[trace.request_T] if self.spec.flow == "dp" else None
        steps = batches(trace, batch_tokens, composition, max_batches, self.seed)
        return self.metered(fitted, trace, steps, home_T)

    def metered(
        self, fitted: Fitted, trace: RoutingTrace, steps: Iterable[NDArray[np.int64]], home_T: NDArray[np.int64] | None
    ) -> LocalityMeter:
        """The same of the given rows of `trace`, step by step. home_T: rank of every token of it (flow dp)."""
        planner = self.planner(fitted, trace)
        meter = LocalityMeter(trace.num_layers, self.ep_size, self.wiring)
        shape = (self.slots, self.ep_size, self.spec, self.wiring)
        for rows_T in steps:
            routed = planner.route(rows_T, None if home_T is None else home_T[rows_T])
            meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, *shape, routed.returns_TL))
        return meter

    def planned(
        self,
        train: RoutingTrace,
        batch_tokens: int,
        composition: str = "shuffled",
        folds: int = 4,
        place: Callable[[int, Profile, Any], Placement] | None = None,
    ) -> dict[str, float]:
        """lar, fan_out and bytes_per_token expected on unseen requests, from the training part alone.

        Each of `folds` parts of the training requests is evaluated with policies fitted on the others; in attention-DP
        in several orders, because a request's home depends on when it comes and nobody knows the order beforehand.
        place(part, profile, predictor): a caller's memory of placements, which schedulers may share (default: place anew).
        """
        meters = []
        for part, (fit, check) in enumerate(Profile.fit(train).folds(folds, self.seed)):
            profile = Profile.fit(fit)
            predictor = self.fit_predictor(profile)
            placement = place(part, profile, predictor) if place else self.place(profile, predictor)
            fitted = Fitted(profile, predictor, placement)
            for order in range(PLANNED_ORDERS if self.home == "request" else 1):
                shuffled_R = np.random.default_rng([self.seed, part, order]).permutation(check.num_requests)
                meters.append(self.locality(fitted, check.select(shuffled_R), batch_tokens, composition))
        tokens = np.array([meter.tokens for meter in meters], dtype=float)
        columns = [meter.columns() for meter in meters]
        figures = {name: float(np.average([c[name] for c in columns], weights=tokens)) for name in ("lar", "fan_out")}
        payload = sum(meter.node_bytes + meter.nic_bytes for meter in meters)
        return figures | {"bytes_per_token": payload / tokens.sum()}


def learn(scheduler: RequestScheduler, fitted: Fitted) -> None:
    """Fit a request scheduler that learns; what else it holds, such as a turn, stays."""
    fit = getattr(scheduler, "fit", None)
    if fit is not None:
        fit(fitted.profile, fitted.placement)


def count_layers(experts_TLk: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """counts_LE of the experts of some tokens."""
    layers = range(experts_TLk.shape[1])
    return np.stack([np.bincount(experts_TLk[:, layer].ravel(), minlength=num_experts) for layer in layers])


def prompt_tokens(trace: RoutingTrace, request: int) -> NDArray[np.integer]:
    """Token ids that are known when the request arrives: its prompt (its first token where none is marked)."""
    start = int(trace.request_offset_R1[request])
    return trace.token_id_T[start : start + max(int(trace.prompt_len_R[request]), 1)]
