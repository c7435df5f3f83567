"""StepPlanner: from the tokens of a step to their homes and the slots that serve them.

Both backends call it: the simulator counts Traffic from the answer, the harness carries it out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from .dispatch import DispatchSpec
from .errors import UserError
from .placement.base import Placement
from .predict.base import Predictor
from .predict.oracle import Oracle
from .schedule.base import Plan, TokenScheduler, capacity_of
from .trace import RoutingTrace


class ReplicaRouter(Protocol):
    """Deterministic choice among the slots of an expert. homes_T is -1 where a token has no home (tp_replicated)."""

    def slots(
        self, experts_Tk: NDArray[np.integer], homes_T: NDArray[np.integer], placement: Placement, layer: int
    ) -> NDArray[np.integer]: ...


@dataclass(frozen=True, eq=False)
class RoutedStep:
    """rows_T rows of the trace, homes_TL the home of each token per layer (None: tp_replicated), slots_TLk who serves.

    planning_s: seconds that look-up, homes and slots took on this machine. returns_TL: where the combine sums the outputs
    of each token (None: at its home).
    """

    rows_T: NDArray[np.int64]
    homes_TL: NDArray[np.integer] | None
    slots_TLk: NDArray[np.integer]
    planning_s: float = 0.0
    returns_TL: NDArray[np.integer] | None = None


class StepPlanner:
    """Homes by flow (dp: the request's rank; tp_scattered: contiguous chunks; tp_shuffled: the token scheduler per
    layer, from the predictor's scores), then slots by the replica router."""

    def __init__(
        self,
        trace: RoutingTrace,
        placement: Placement,
        spec: DispatchSpec,
        token_scheduler: TokenScheduler | None = None,
        predictor: Predictor | None = None,
        replica_router: ReplicaRouter | None = None,
        home_cap: float = 1.0,
    ) -> None:
        if spec.flow == "tp_shuffled" and token_scheduler is None:
            raise UserError("flow tp_shuffled needs a token scheduler")
        if placement.has_replicas and replica_router is None:
            raise UserError(f"{placement.num_slots} slots for {placement.num_experts} experts need a replica router")
        if placement.num_layers != trace.num_layers:
            raise UserError(f"placement has {placement.num_layers} layers, the trace {trace.num_layers}")
        if not home_cap >= 1.0:
            raise UserError(f"home_cap={home_cap} must be at least 1")
        self.rehomes = bool(getattr(token_scheduler, "rehomes", False))
        if self.rehomes and spec.dispatcher != "a2a_dedup":
            raise UserError(
                f"a token scheduler that re-homes needs dispatcher=a2a_dedup (got {spec.dispatcher}): only there are a "
                "token's outputs summed on each rank before they travel"
            )
        self.trace, self.placement, self.spec = trace, placement, spec
        self.token_scheduler, self.predictor, self.replica_router = token_scheduler, predictor, replica_router
        self.home_cap, self.ranks = home_cap, placement.ep_size
        if getattr(token_scheduler, "sees_routes", False):
            self.predictor = predictor = Oracle.of(trace)
        self.lookback = int(getattr(predictor, "lookback", 0))
        self.reveals = bool(getattr(predictor, "sees_routes", False))

    def route(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> RoutedStep:
        """Plan one step. queue_T: the rank of each token's request (dp), ignored elsewhere."""
        start = time.perf_counter()
        homes_TL = self._homes(rows_T, queue_T)
        slots_TLk = self._slots(rows_T, homes_TL)
        returns_TL = self._returns(slots_TLk, homes_TL) if self.rehomes and homes_TL is not None else None
        return RoutedStep(rows_T, homes_TL, slots_TLk, time.perf_counter() - start, returns_TL)

    def _homes(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> NDArray[np.integer] | None:
        tokens, layers = len(rows_T), self.trace.num_layers
        if self.spec.flow == "tp_replicated":
            return None
        if self.spec.flow == "dp":
            assert queue_T is not None
            return np.repeat(np.asarray(queue_T, dtype=np.int64)[:, None], layers, axis=1)
        if self.spec.flow == "tp_scattered":
            counts = np.full(self.ranks, tokens // self.ranks) + (np.arange(self.ranks) < tokens % self.ranks)
            return np.repeat(np.repeat(np.arange(self.ranks), counts)[:, None], layers, axis=1)
        return self._shuffled_homes(rows_T)

    def _shuffled_homes(self, rows_T: NDArray[np.int64]) -> NDArray[np.integer]:
        assert self.token_scheduler is not None
        tokens, layers = len(rows_T), self.trace.num_layers
        homes_TL = np.empty((tokens, layers), dtype=np.int64)
        capacity = capacity_of(tokens, self.ranks, self.home_cap)
        for layer in range(layers):
            plan = self.token_scheduler.homes(self.scores(rows_T, layer), capacity)
            if not isinstance(plan, Plan) or len(plan.owner_T) != tokens:
                told = f"a Plan of {len(plan.owner_T)}" if isinstance(plan, Plan) else type(plan).__name__
                raise UserError(
                    f"token scheduler {type(self.token_scheduler).__name__}: homes() returned {told}; a Plan of the "
                    f"{tokens} tokens is right (Plan.from_owner)"
                )
            homes_TL[:, layer] = plan.owner_T
        return homes_TL

    def scores(self, rows_T: NDArray[np.int64], layer: int) -> NDArray[np.int32]:
        """score_TG of these tokens: what the predictor tells the token scheduler (zero without one)."""
        if self.predictor is None:
            return np.zeros((len(rows_T), self.ranks), dtype=np.int32)
        history = self._history(rows_T, layer)
        found = self.predictor.scores(self.trace.token_id_T[rows_T], layer, history, self.placement)
        right = (len(rows_T), self.ranks)
        if not isinstance(found, tuple) or np.shape(found[0]) != right:
            told = f"scores of shape {np.shape(found[0])}" if isinstance(found, tuple) else type(found).__name__
            raise UserError(
                f"predictor {type(self.predictor).__name__}: scores() returned {told}; (score_TG of shape {right}, "
                "confidence_T) is right"
            )
        return found[0]

    def _returns(self, slots_TLk: NDArray[np.integer], homes_TL: NDArray[np.integer]) -> NDArray[np.integer]:
        """Where each token's outputs are summed, decided on the actual experts."""
        scheduler: Any = self.token_scheduler
        rank_TLk = slots_TLk // self.placement.slots_per_rank
        capacity = capacity_of(len(slots_TLk), self.ranks, self.home_cap)
        returns_TL = np.empty_like(homes_TL)
        for layer in range(slots_TLk.shape[1]):
            serves_TG = np.zeros((len(slots_TLk), self.ranks), dtype=bool)
            np.put_along_axis(serves_TG, rank_TLk[:, layer].astype(np.int64), True, axis=1)
            returns_TL[:, layer] = scheduler.returns(serves_TG, homes_TL[:, layer], capacity)
        return returns_TL

    def _history(self, rows_T: NDArray[np.int64], layer: int) -> NDArray[np.integer] | None:
        """Actual experts of the layers before, newest first (-1 absent): carried beside the all-gather.

        An oracle (`sees_routes`) is handed those of the layer itself, [T, 1, k].
        """
        if self.reveals:
            return self.trace.experts_TLk[rows_T, layer][:, None]
        if not self.lookback:
            return None
        history = np.full((len(rows_T), self.lookback, self.trace.top_k), -1, dtype=np.int16)
        for back in range(1, min(self.lookback, layer) + 1):
            history[:, back - 1] = self.trace.experts_TLk[rows_T, layer - back]
        return history

    def _slots(self, rows_T: NDArray[np.int64], homes_TL: NDArray[np.integer] | None) -> NDArray[np.integer]:
        if not self.placement.has_replicas:
            return gather_slots(self.trace.experts_TLk, rows_T, self.placement.first_slot_LE)
        assert self.replica_router is not None
        at_once = getattr(self.replica_router, "slots_of_layers", None)
        if at_once is not None and homes_TL is not None:
            return np.asarray(at_once(self.trace.experts_TLk, rows_T, homes_TL, self.placement))
        slots_TLk = np.empty((len(rows_T), self.trace.num_layers, self.trace.top_k), dtype=np.int32)
        for layer in range(self.trace.num_layers):
            homes_T = np.full(len(rows_T), -1) if homes_TL is None else homes_TL[:, layer]
            experts_Tk = self.trace.experts_TLk[rows_T, layer]
            slots_Tk = self.replica_router.slots(experts_Tk, homes_T, self.placement, layer)
            if np.shape(slots_Tk) != experts_Tk.shape:
                raise UserError(
                    f"replica router {type(self.replica_router).__name__}: slots() returned {type(slots_Tk).__name__} of "
                    f"shape {np.shape(slots_Tk)}; a slot for each of the experts_Tk, {experts_Tk.shape}, is right"
                )
            slots_TLk[:, layer] = slots_Tk
        return slots_TLk


@numba.njit(cache=True)
def gather_slots(experts_NLk, rows_T, slot_LE):  # type: ignore[no-untyped-def]
    """slots[t, l, j] = slot of expert experts[rows[t], l, j]: the only slot of each expert, without replicas."""
    layers, k = experts_NLk.shape[1], experts_NLk.shape[2]
    slots = np.empty((len(rows_T), layers, k), dtype=np.int32)
    for t in range(len(rows_T)):
        row = rows_T[t]
        for layer in range(layers):
            for j in range(k):
                slots[t, layer, j] = slot_LE[layer, np.uint64(experts_NLk[row, layer, j])]  # ids are >= 0
    return slots
