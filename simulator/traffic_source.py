"""Where the Traffic of a step comes from: the routes of its very tokens, or what tokens at their homes have on average.

    TracedTraffic    every token's experts in every layer, from the held-out trace (routing=traced)
    ExpectedTraffic  no routes: so many tokens at each home times rates a token (routing=expected). Rates are means over the
                     held-out part, planned with the same policies (the training part, which they have seen, would flatter
                     them): assignments and distinct serving ranks by home, and the chance p of each slot. The expected
                     active slots are sum(1 - prod_homes (1 - p)^tokens), as if tokens were independent. Rates of a home
                     lean to those of all homes by PRIOR tokens

What expectation cannot show: the slowest rank of a step is slower than the mean one by chance, and tokens of a request
are alike. `python -m simulator.expected_error` measures both against traced routes.
"""

from __future__ import annotations

from typing import Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.planning import StepPlanner
from semmoe.replica_router import Local
from semmoe.serving import StepPlan, Stretch, TokenRows
from semmoe.traffic import Traffic, count_trace_rows, count_traffic, with_collectives
from semmoe.traffic.route_counts import Counts
from semmoe.traffic.wiring import Wiring

Float = NDArray[np.float64]
PRIOR = 32.0  # tokens
BATCH = 512  # tokens planned at once


class TrafficSource(Protocol):
    """queue_T: home rank of every row where the flow has one."""

    def of_rows(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> Traffic: ...

    def of_plan(self, step: StepPlan, tokens: TokenRows) -> Traffic: ...

    def of_stretch(self, stretch: Stretch, tokens: TokenRows) -> Traffic:
        """Its S steps as one of S * L layers (flow dp, without replicas, one node)."""
        ...


class TracedTraffic:
    """Counts of the planned routes."""

    def __init__(self, planner: StepPlanner, spec: DispatchSpec, wiring: Wiring) -> None:
        self.planner, self.spec, self.wiring = planner, spec, wiring
        self._slots = planner.placement.num_slots
        local = isinstance(planner.replica_router, Local)
        plain = not planner.placement.has_replicas
        self._straight = spec.flow == "dp" and ((plain or local) if wiring.wide else plain and wiring.nodes == 1)

    def of_rows(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> Traffic:
        if self._straight and queue_T is not None:
            return self._of_trace(rows_T, queue_T)
        routed = self.planner.route(rows_T, queue_T)
        shape = (self._slots, self.planner.ranks)
        return count_traffic(routed.slots_TLk, routed.homes_TL, *shape, self.spec, self.wiring, routed.returns_TL)

    def of_plan(self, step: StepPlan, tokens: TokenRows) -> Traffic:
        return self.of_rows(*step.token_rows(tokens))

    def of_stretch(self, stretch: Stretch, tokens: TokenRows) -> Traffic:
        return self._of_trace(*stretch.token_rows(tokens), stretch.steps)

    def _of_trace(
        self,
        rows_T: NDArray[np.int64],
        queue_T: NDArray[np.integer],
        step_T: NDArray[np.int64] | None = None,
        steps: int = 1,
    ) -> Traffic:
        planner = self.planner
        routes = planner.trace.experts_TLk
        return count_trace_rows(routes, rows_T, queue_T, planner.placement, self.spec, self.wiring, step_T, steps)


class ExpectedTraffic:
    """Rates a token at home on rank S (S = 1 where tokens have no home): assignment_LSG, distinct_LSG to each rank,
    chance_SLP of each slot, copies_LSN to each node; home_LG: share of a step's tokens at home on each rank."""

    def __init__(self, planner: StepPlanner, rank_R: NDArray[np.integer] | None, wiring: Wiring) -> None:
        """planner: over the requests to average over; rank_R: rank of each of its requests where the flow has one (dp)."""
        wiring = wiring.with_pairs()
        if wiring.wide:
            raise UserError(f"routing=expected knows rates of pairs, not of {wiring.ranks} ranks; use routing=traced")
        if planner.rehomes:
            raise UserError("routing=expected does not know where re-homed outputs return; use routing=traced")
        self.spec, self.wiring, self.ranks = planner.spec, wiring, planner.ranks
        self._dp, self._homeless = rank_R is not None, planner.spec.flow == "tp_replicated"
        train, slots = planner.trace, planner.placement.num_slots
        layers, ranks = train.num_layers, self.ranks
        homes_LS = np.zeros((layers, 1 if self._homeless else ranks))
        hits_LSP = np.zeros((*homes_LS.shape, slots))
        distinct_LSG = np.zeros((*homes_LS.shape, ranks))
        copies_LSN = np.zeros((*homes_LS.shape, wiring.nodes))
        for begin in range(0, train.num_tokens, BATCH):
            rows_T = np.arange(begin, min(begin + BATCH, train.num_tokens))
            routed = planner.route(rows_T, None if rank_R is None else rank_R[train.request_T[rows_T]])
            traffic = count_traffic(routed.slots_TLk, routed.homes_TL, slots, ranks, self.spec, wiring)
            homes_TL = np.zeros((len(rows_T), layers), np.int64) if self._homeless else routed.homes_TL
            add_hits(routed.slots_TLk, homes_TL, hits_LSP)
            homes_LS += len(rows_T) if self._homeless else traffic.homes_LG
            distinct_LSG += traffic.rank_pairs_LGG if not self._homeless else 0
            sent = [c.copies_LGN for c in traffic.collectives if c.op == "dispatch" and c.copies_LGN is not None]
            copies_LSN += sent[0] if sent else 0
        rates_LSP = _leaning(hits_LSP, homes_LS)
        self._home_LG = homes_LS / homes_LS.sum(axis=1, keepdims=True)
        self._assigned_LSG = rates_LSP.reshape(*homes_LS.shape, ranks, -1).sum(axis=-1)
        self._distinct_LSG = _leaning(distinct_LSG, homes_LS)
        self._copies_LSN = _leaning(copies_LSN, homes_LS)
        self._idle_SLP = np.log1p(-np.clip(rates_LSP, 0, 1 - 1e-9)).swapaxes(0, 1).copy()

    def of_rows(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> Traffic:
        tokens_G = np.bincount(queue_T, minlength=self.ranks) if self._dp and queue_T is not None else None
        return self._expected(len(rows_T), tokens_G)

    def of_plan(self, step: StepPlan, tokens: TokenRows) -> Traffic:
        tokens_G = np.bincount(step.rank_N, weights=step.count_N, minlength=self.ranks) if self._dp else None
        return self._expected(step.num_tokens, tokens_G)

    def of_stretch(self, stretch: Stretch, tokens: TokenRows) -> Traffic:
        tokens_SG = stretch.tokens_SG(self.ranks)
        changes_S = np.append(True, (tokens_SG[1:] != tokens_SG[:-1]).any(axis=1))  # most steps are as the one before
        each = [self._counts(int(tokens_G.sum()), tokens_G) for tokens_G in tokens_SG[changes_S]]
        repeats = np.diff(np.append(np.flatnonzero(changes_S), len(tokens_SG))).tolist()
        joined = (
            np.concatenate([part for part, times in zip(parts, repeats, strict=True) for _ in range(times)])
            for parts in zip(*each, strict=True)
        )
        return with_collectives(Traffic(*Counts(*joined), tokens=int(tokens_SG.sum())), self.spec)

    def _expected(self, tokens: int, tokens_G: NDArray[np.number] | None) -> Traffic:
        counts = self._counts(tokens, tokens_G)
        traffic, homes_LS = Traffic(*counts, tokens=tokens), counts.homes_LG
        if self.wiring.nodes == 1 or self._homeless:
            return with_collectives(traffic, self.spec)
        everywhere = np.repeat(homes_LS[:, :, None], self.wiring.nodes, axis=2)
        served = {"allgather_rs": everywhere, "a2a_dedup": homes_LS[:, :, None] * self._copies_LSN}
        return with_collectives(traffic, self.spec, everywhere, served.get(str(self.spec.dispatcher)))  # type: ignore[arg-type]

    def _counts(self, tokens: int, tokens_G: NDArray[np.number] | None) -> Counts:
        layers, slots = len(self._home_LG), self._idle_SLP.shape[2]
        if tokens_G is not None:
            idle_LP = (tokens_G.astype(float) @ self._idle_SLP.reshape(self.ranks, -1)).reshape(layers, slots)
            homes_LS = np.broadcast_to(tokens_G.astype(float), (layers, self.ranks))
        else:
            homes_LS = tokens * self._home_LG
            idle_LP = np.einsum("ls,slp->lp", homes_LS, self._idle_SLP)
        active_LG = -np.expm1(idle_LP).reshape(layers, self.ranks, -1).sum(axis=2)
        pairs_LSG = homes_LS[:, :, None] * self._assigned_LSG
        rows_LG = pairs_LSG.sum(axis=1)
        if self._homeless:
            zero = np.zeros((layers, self.ranks, self.ranks))
            return Counts(zero[:, 0], zero, zero, rows_LG, active_LG)  # type: ignore[arg-type]
        distinct_LSG = homes_LS[:, :, None] * self._distinct_LSG
        return Counts(homes_LS, pairs_LSG, distinct_LSG, rows_LG, active_LG)  # type: ignore[arg-type]


def _leaning(count_LSX: Float, homes_LS: Float) -> Float:
    """Counts a token, leaning to the rate over all homes by PRIOR tokens."""
    overall_L1X = count_LSX.sum(axis=1, keepdims=True) / homes_LS.sum(axis=1)[:, None, None]
    return np.asarray((count_LSX + PRIOR * overall_L1X) / (homes_LS[:, :, None] + PRIOR))


@numba.njit(cache=True)
def add_hits(slots_TLk, homes_TL, hits_LSP):  # type: ignore[no-untyped-def]
    """hits_LSP[l, s, p] += assignments of tokens at home on s to slot p."""
    tokens, layers, k = slots_TLk.shape
    for t in range(tokens):
        for layer in range(layers):
            for j in range(k):
                hits_LSP[layer, homes_TL[t, layer], slots_TLk[t, layer, j]] += 1
