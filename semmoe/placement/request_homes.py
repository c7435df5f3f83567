"""Attention-DP's placement of all layers: one home a training request, shared by the layers, against experts per layer.

Homes: the exact capped assignment of requests by the assignments that each rank would serve at home, summed over
layers. Experts: per layer, given the homes. In turn until nothing improves, from a given start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped, capped_owners, narrowed
from .exchange import best_experts, exchange, overload, rank_loads, value
from .nodes import traffic_between
from .replicas import RAMP, add_replicas, expected_loads, held_value, trade
from .token_homes import shuffled

POLISH = 2e7  # operations of one round of polish_requests() that a start may cost


@dataclass(frozen=True, eq=False)
class RequestSide:
    """All layers of attention-DP (semantic.Side): counts of the requests (phantoms behind the `experts` real ones),
    loads per layer as one fold, at most `capacity` requests at a home. Starts are homes.
    """

    experts: int
    counts_LRE: NDArray[np.int32]
    load_LFE: NDArray[np.float64]
    ranks: int
    capacity: int
    target: float
    iterations: int

    @property
    def work(self) -> float:
        return 4.0 * (self._round + self.iterations * self.counts_LRE.size)  # exact homes cost more than sums

    @property
    def _round(self) -> float:
        """Operations of polishing once, 0 where that is too much."""
        pairs = self.counts_LRE.size * self.counts_LRE.shape[2] * self.ranks
        return pairs if pairs <= POLISH else 0.0

    def fresh(self, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.permutation(np.arange(self.counts_LRE.shape[1]) % self.ranks)

    def kicked(self, rank: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.int64]:
        return shuffled(request_homes(self.counts_LRE, one_hot(rank, self.ranks), self.capacity), share, rng)

    def improved(self, start: NDArray[np.int64], weight: float) -> tuple[float, NDArray[np.int64]]:
        fixed = (self.ranks, self.capacity, weight, self.target)
        value, rank_LE = alternate_requests(self.counts_LRE, self.load_LFE, start, *fixed, self.iterations)
        if self._round:
            value += polish_requests(self.counts_LRE, self.load_LFE, rank_LE, *fixed)
        return value, rank_LE

    def replicated(self, rank: NDArray[np.int64], slots_a_rank: int, weight: float) -> tuple[float, NDArray[np.bool_]]:
        counts_LRE, load_LFE = self.counts_LRE[..., : self.experts], self.load_LFE[..., : self.experts]
        holds_LEG = one_hot(rank[:, : self.experts], self.ranks)
        home_R = request_homes(counts_LRE, holds_LEG, self.capacity)
        for counts_RE, load_FE, holds_EG in zip(counts_LRE, load_LFE, holds_LEG, strict=True):
            local_EG = local_counts_EG(counts_RE, home_R, self.ranks)
            add_replicas(local_EG, load_FE, holds_EG, slots_a_rank - holds_EG.sum(axis=0), weight, self.target)
        value = 0.0
        for part in RAMP:
            value, holds_LEG = alternate_held_requests(
                counts_LRE, load_LFE, holds_LEG, self.capacity, part * weight, self.target, self.iterations
            )
        return value, holds_LEG

    def traffic_GG(self, holds: NDArray[np.bool_]) -> NDArray[np.float64]:
        experts = holds.shape[1]
        home_R = request_homes(self.counts_LRE[..., :experts], holds, self.capacity)
        traffic_GG = np.zeros((self.ranks, self.ranks))
        for counts_RE, load_FE, holds_EG in zip(self.counts_LRE, self.load_LFE, holds, strict=True):
            local_EG = local_counts_EG(counts_RE[:, :experts], home_R, self.ranks)
            traffic_GG += traffic_between(local_EG, expected_loads(local_EG, load_FE[:, :experts], holds_EG)[0])
        return traffic_GG


def request_home_scores(counts_LRE: NDArray[np.integer], holds_LEG: NDArray[np.bool_]) -> NDArray[np.int64]:
    """score_RG: assignments of request r that rank g can serve, summed over layers."""
    score = np.zeros((counts_LRE.shape[1], holds_LEG.shape[2]), dtype=np.float64)
    for counts_RE, holds_EG in zip(counts_LRE, holds_LEG, strict=True):
        score += counts_RE.astype(np.float64) @ holds_EG.astype(np.float64)
    return score.astype(np.int64)


def request_homes(counts_LRE: NDArray[np.integer], holds_LEG: NDArray[np.bool_], capacity: int) -> NDArray[np.int64]:
    """home_R [R], at most `capacity` requests a rank."""
    return assign_capped(narrowed(request_home_scores(counts_LRE, holds_LEG)), capacity)


def local_counts_EG(counts_RE: NDArray[np.integer], home_R: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """local_EG: assignments to e from requests at home g."""
    home_RG = (home_R[:, None] == np.arange(ranks)).astype(np.float64)
    return (counts_RE.T.astype(np.float64) @ home_RG).astype(np.int64)


def one_hot(rank_LE: NDArray[np.integer], ranks: int) -> NDArray[np.bool_]:
    return np.asarray(rank_LE[..., None] == np.arange(ranks))


@numba.njit(cache=True)
def best_request_homes(score_RG, capacity_G):  # type: ignore[no-untyped-def]
    """home_R of the largest summed score (int64, scaled down to int32 where it must be)."""
    shift = 0
    while (score_RG.max() >> shift) >= 2**31:
        shift += 1
    return capped_owners((score_RG >> shift).astype(np.int32), capacity_G)


@numba.njit(cache=True)
def scores_at(counts_LRE, rank_LE, ranks):  # type: ignore[no-untyped-def]
    """request_home_scores() of a placement without replicas."""
    layers, requests, experts = counts_LRE.shape
    score = np.zeros((requests, ranks), dtype=np.int64)
    for layer in range(layers):
        for r in range(requests):
            for e in range(experts):
                score[r, rank_LE[layer, e]] += counts_LRE[layer, r, e]
    return score


@numba.njit(cache=True)
def locals_at(counts_LRE, home_R, ranks):  # type: ignore[no-untyped-def]
    """local_LEG: local_counts_EG() of every layer, compiled."""
    layers, requests, experts = counts_LRE.shape
    local = np.empty((layers, experts, ranks), dtype=np.int64)
    local_GE = np.empty((ranks, experts), dtype=np.int64)  # contiguous over experts: adds run as vectors
    for layer in range(layers):
        local_GE[:] = 0
        for r in range(requests):
            row, counts_E = local_GE[home_R[r]], counts_LRE[layer, r]
            for e in range(experts):
                row[e] += counts_E[e]
        local[layer] = local_GE.T
    return local


@numba.njit(cache=True)
def alternate_requests(counts_LRE, load_LFE, home_R, ranks, capacity, weight, target, iterations):  # type: ignore[no-untyped-def]
    """(mean J over layers, rank_LE), starting from homes."""
    layers, _, experts = counts_LRE.shape
    capacity_G = np.full(ranks, capacity, dtype=np.int64)
    best, best_LE = -1e30, np.zeros((layers, experts), dtype=np.int64)
    rank_LE = np.zeros((layers, experts), dtype=np.int64)
    local_LEG = locals_at(counts_LRE, home_R, ranks)
    for turn in range(iterations):
        for layer in range(layers):
            local_EG = local_LEG[layer]
            fresh = best_experts(local_EG, load_LFE[layer], weight, target)
            if turn > 0:
                kept = rank_LE[layer].copy()
                exchange(local_EG, load_LFE[layer], kept, weight, target)
                if value(local_EG, load_LFE[layer], kept, weight, target) >= value(
                    local_EG, load_LFE[layer], fresh, weight, target
                ):
                    fresh = kept
            rank_LE[layer] = fresh
        home_R = best_request_homes(scores_at(counts_LRE, rank_LE, ranks), capacity_G)
        local_LEG = locals_at(counts_LRE, home_R, ranks)
        now = 0.0
        for layer in range(layers):
            now += value(local_LEG[layer], load_LFE[layer], rank_LE[layer], weight, target) / layers
        if now <= best + 1e-9:
            break
        best, best_LE = now, rank_LE.copy()
    return best, best_LE


@numba.njit(cache=True)
def polish_requests(counts_LRE, load_LFE, rank_LE, ranks, capacity, weight, target):  # type: ignore[no-untyped-def]
    """Gain in mean J while two experts of a layer trade ranks (rank_LE in place), each trade judged with the homes
    that are best after it, until no trade helps. The alternation is stuck where only both moves together help."""
    layers, requests, experts = counts_LRE.shape
    capacity_G = np.full(ranks, capacity, dtype=np.int64)
    score_RG = scores_at(counts_LRE, rank_LE, ranks)
    total = max(float(counts_LRE.sum()), 1.0)
    trial_RG = np.empty_like(score_RG)
    home_R = best_request_homes(score_RG, capacity_G)
    served = 0
    for r in range(requests):
        served += score_RG[r, home_R[r]]
    excess_L = np.zeros(layers)
    for layer in range(layers):
        excess_L[layer] = overload(rank_loads(load_LFE[layer], rank_LE[layer], ranks), target)
    gained, improved = 0.0, True
    while improved:
        improved = False
        for layer in range(layers):
            counts_RE, rank_E = counts_LRE[layer], rank_LE[layer]
            for a in range(experts):
                for b in range(a):
                    g, h = rank_E[a], rank_E[b]
                    if g == h:
                        continue
                    optimistic = 0
                    for r in range(requests):
                        shift = counts_RE[r, a] - counts_RE[r, b]
                        trial_RG[r] = score_RG[r]
                        trial_RG[r, g] -= shift
                        trial_RG[r, h] += shift
                        optimistic += trial_RG[r].max()
                    rank_E[a], rank_E[b] = h, g
                    excess = overload(rank_loads(load_LFE[layer], rank_E, ranks), target) if weight > 0 else 0.0
                    lost = weight * (excess - excess_L[layer]) / layers
                    better = False
                    if (optimistic - served) / total - lost > 1e-9:
                        home_R = best_request_homes(trial_RG, capacity_G)
                        now = 0
                        for r in range(requests):
                            now += trial_RG[r, home_R[r]]
                        gain = (now - served) / total - lost
                        better = gain > 1e-9
                    if better:
                        score_RG[:] = trial_RG
                        served, improved = now, True
                        gained += gain
                        excess_L[layer] = excess
                    else:
                        rank_E[a], rank_E[b] = g, h
    return gained


def alternate_held_requests(
    counts_LRE: NDArray[np.integer],
    load_LFE: NDArray[np.floating],
    holds_LEG: NDArray[np.bool_],
    capacity: int,
    weight: float,
    target: float,
    iterations: int,
) -> tuple[float, NDArray[np.bool_]]:
    """(mean J over layers, holds_LEG): alternate_requests() for placements with replicas, starting from holds_LEG."""
    layers, ranks = range(len(counts_LRE)), holds_LEG.shape[2]
    best, best_LEG = -np.inf, holds_LEG
    for _ in range(iterations):
        home_R = request_homes(counts_LRE, holds_LEG, capacity)
        local_LEG = np.stack([local_counts_EG(counts_LRE[layer], home_R, ranks) for layer in layers])
        values = [held_value(local_LEG[i], load_LFE[i], holds_LEG[i], weight, target) for i in layers]
        if np.mean(values) <= best + 1e-9:
            break
        best, best_LEG = float(np.mean(values)), holds_LEG
        holds_LEG = holds_LEG.copy()
        for layer in layers:
            trade(local_LEG[layer], load_LFE[layer], holds_LEG[layer], weight, target)
    return best, best_LEG
