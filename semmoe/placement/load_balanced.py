"""Longest processing time first with equal counts: the heaviest expert to the lightest rank with room, then exchanges."""

from __future__ import annotations

import numba
import numpy as np

from ..errors import UserError
from .base import Placement, PlacementProblem
from .eplb import replicate
from .groups import from_holds, most_a_rank

PEAK, SPREAD = 0, 1


class LoadBalanced:
    """Experts to ranks by load alone (LPT, then exchanges), equally many on each; free slots copy the hottest experts.

    kicks: how often some experts are shuffled and the exchanges start again; 0: plain LPT without exchanges.
    """

    def __init__(self, kicks: int = 32) -> None:
        if kicks < 0:
            raise UserError(f"placement.kicks={kicks} must be at least 0")
        self.kicks = kicks

    def place(self, problem: PlacementProblem) -> Placement:
        experts, ranks = problem.model.num_experts, problem.ep_size
        slots = min(problem.slots, experts * ranks)
        holds_LEG = np.zeros((problem.profile.num_layers, experts, ranks), dtype=bool)
        for holds_EG, load_E in zip(holds_LEG, problem.profile.load_LE, strict=True):
            copies = max(slots, experts)
            expert_N, count_E = replicate(load_E.astype(np.float32), copies, ranks)
            size = max(most_a_rank(copies, ranks), problem.slots // ranks)
            load_N = np.zeros(size * ranks)
            load_N[:copies] = load_E[expert_N] / count_E[expert_N]
            kind_N = np.full(size * ranks, -1)
            kind_N[:copies] = np.where(count_E[expert_N] > 1, expert_N, -1)
            rank_N = balance(load_N, kind_N, ranks, PEAK, self.kicks, problem.seed)
            holds_EG[expert_N, rank_N[:copies]] = True
        return from_holds(holds_LEG, problem)


@numba.njit(cache=True)
def balance(load_N, kind_N, ranks, aim, kicks, seed):  # type: ignore[no-untyped-def]
    """rank_N: N / G items a rank with the least peak load (PEAK) or sum of |load - mean| (SPREAD) found.

    Items of one kind >= 0 stay on different ranks.
    """
    np.random.seed(seed)
    items = len(load_N)
    rank_N = first_fit(load_N, kind_N, ranks)
    best_rank = rank_N.copy()
    if kicks > 0:
        trade(load_N, kind_N, rank_N, ranks, aim)
        best_rank[:] = rank_N
    best = cost(load_N, rank_N, ranks, aim)
    for kick in range(kicks):
        rank_N[:] = best_rank
        for _ in range(1 + kick % 4 + items // 16):
            a, b = np.random.randint(items), np.random.randint(items)
            if rank_N[a] != rank_N[b] and not clash(kind_N, rank_N, a, b):
                rank_N[a], rank_N[b] = rank_N[b], rank_N[a]
        trade(load_N, kind_N, rank_N, ranks, aim)
        now = cost(load_N, rank_N, ranks, aim)
        if now <= best:
            best = now
            best_rank[:] = rank_N
    return best_rank


@numba.njit(cache=True)
def cost(load_N, rank_N, ranks, aim):  # type: ignore[no-untyped-def]
    load_G = np.zeros(ranks)
    for n in range(len(load_N)):
        load_G[rank_N[n]] += load_N[n]
    if aim == PEAK:
        return load_G.max()
    return np.abs(load_G - load_G.mean()).sum()


@numba.njit(cache=True)
def first_fit(load_N, kind_N, ranks):  # type: ignore[no-untyped-def]
    """LPT. Copies of one kind are dealt out first: until then no rank can be full of the wrong ones."""
    items = len(load_N)
    rank_N = np.full(items, -1, dtype=np.int64)
    load_G = np.zeros(ranks)
    room_G = np.full(ranks, items // ranks, dtype=np.int64)
    order = np.argsort(-load_N, kind="mergesort")
    for copies in (True, False):
        for n in order:
            if (kind_N[n] >= 0) != copies:
                continue
            at = -1
            for g in range(ranks):
                taken = False
                if copies:
                    for m in range(items):
                        taken = taken or (rank_N[m] == g and kind_N[m] == kind_N[n])
                if room_G[g] > 0 and not taken and (at < 0 or load_G[g] < load_G[at]):
                    at = g
            if at < 0:  # a kind that every rank with room holds: any room will do, the slot stays empty
                at = int(np.argmax(room_G))
            rank_N[n] = at
            load_G[at] += load_N[n]
            room_G[at] -= 1
    return rank_N


@numba.njit(cache=True)
def clash(kind_N, rank_N, a, b):  # type: ignore[no-untyped-def]
    """Whether trading a and b would bring two of a kind together."""
    for n in range(len(kind_N)):
        if kind_N[n] < 0 or n in (a, b):
            continue
        if kind_N[n] == kind_N[a] and rank_N[n] == rank_N[b]:
            return True
        if kind_N[n] == kind_N[b] and rank_N[n] == rank_N[a]:
            return True
    return False


@numba.njit(cache=True)
def trade(load_N, kind_N, rank_N, ranks, aim):  # type: ignore[no-untyped-def]
    """Trade pairs in place while the cost of both ranks falls; squares break ties, so that descents do not stop early."""
    items = len(load_N)
    load_G = np.zeros(ranks)
    for n in range(items):
        load_G[rank_N[n]] += load_N[n]
    mean = load_G.mean()
    least = 1e-9 * (1.0 + mean)
    improved = True
    while improved:
        improved = False
        for a in range(items):
            partner, best_cost, best_square = -1, -least, -least
            for b in range(items):
                g, h = rank_N[a], rank_N[b]
                shift = load_N[a] - load_N[b]
                if g == h or shift == 0:
                    continue
                x, y = load_G[g], load_G[h]
                if aim == PEAK:
                    change = max(x - shift, y + shift) - max(x, y)
                else:
                    change = abs(x - shift - mean) + abs(y + shift - mean) - abs(x - mean) - abs(y - mean)
                square = 2.0 * shift * (shift - x + y)
                better = change < best_cost or (abs(change - best_cost) <= least and square < best_square)
                gains = change < -least or (change <= least and square < -least)
                if gains and (partner < 0 or better) and not clash(kind_N, rank_N, a, b):
                    partner, best_cost, best_square = b, change, square
            if partner >= 0:
                g, h = rank_N[a], rank_N[partner]
                shift = load_N[a] - load_N[partner]
                load_G[g] -= shift
                load_G[h] += shift
                rank_N[a], rank_N[partner] = h, g
                improved = True
