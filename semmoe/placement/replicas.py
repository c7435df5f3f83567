"""Placements with replicas of one layer: whatever fills the slots best for given homes.

Maximise J = (assignments whose home rank holds their expert) / (all) - weight * overload (exchange.py), at most one copy
of an expert a rank, every expert somewhere. Free slots are filled greedily (add_replicas), then slots change hands while
that raises J (trade): two ranks trade an expert each, or a rank gives up a copy that is not the last for another expert.
A copy of a hot expert takes load from its rank, so the experts around it must move again: filling alone is stuck early.

Rows of an expert: those of tokens at home with a copy are served there, the rest spreads evenly over the copies. (The
replica router sends them to the least loaded copy, which is never worse for the largest load.)
"""

from __future__ import annotations

import numba
import numpy as np

from .exchange import overload

RAMP = (0.25, 1.0)  # parts of the load weight, one after the other: load that is minded at once blocks good trades


@numba.njit(cache=True)
def spread(local_EG, holds_EG, e, out_G):  # type: ignore[no-untyped-def]
    """out_G: share of the rows of e that each rank serves."""
    ranks = local_EG.shape[1]
    total, remote, copies = 0.0, 0.0, 0
    for g in range(ranks):
        total += local_EG[e, g]
        if holds_EG[e, g]:
            copies += 1
        else:
            remote += local_EG[e, g]
    for g in range(ranks):
        out_G[g] = 0.0
        if holds_EG[e, g]:
            out_G[g] = (local_EG[e, g] + remote / copies) / total if total > 0 else 1.0 / copies


@numba.njit(cache=True)
def expected_loads(local_EG, load_FE, holds_EG):  # type: ignore[no-untyped-def]
    """(spread_EG, load_FG): who serves which share of each expert, and the loads in units of a rank's mean."""
    experts, ranks = local_EG.shape
    spread_EG = np.empty((experts, ranks), dtype=np.float64)
    for e in range(experts):
        spread(local_EG, holds_EG, e, spread_EG[e])
    return spread_EG, in_means(load_FE, ranks) @ spread_EG


@numba.njit(cache=True)
def in_means(load_FE, ranks):  # type: ignore[no-untyped-def]
    """Expert loads in units of a rank's mean load, per fold; zero where a fold has none."""
    share_FE = np.zeros(load_FE.shape, dtype=np.float64)
    for f in range(load_FE.shape[0]):
        share_FE[f] = load_FE[f] * (ranks / max(load_FE[f].sum(), 1e-300))
    return share_FE


@numba.njit(cache=True)
def held_value(local_EG, load_FE, holds_EG, weight, target):  # type: ignore[no-untyped-def]
    """J of the module's formula."""
    served, total = 0.0, 0.0
    for e in range(local_EG.shape[0]):
        for g in range(local_EG.shape[1]):
            total += local_EG[e, g]
            if holds_EG[e, g]:
                served += local_EG[e, g]
    _, load_FG = expected_loads(local_EG, load_FE, holds_EG)
    return served / max(total, 1.0) - weight * overload(load_FG, target)


@numba.njit(cache=True)
def _overload_with(load_FG, share_FE, spread_EG, a, new_a_G, b, new_b_G, target):  # type: ignore[no-untyped-def]
    """overload once expert a is served as new_a_G, and b (-1: none) as new_b_G."""
    excess = 0.0
    for f in range(load_FG.shape[0]):
        for g in range(load_FG.shape[1]):
            load = load_FG[f, g] + share_FE[f, a] * (new_a_G[g] - spread_EG[a, g])
            if b >= 0:
                load += share_FE[f, b] * (new_b_G[g] - spread_EG[b, g])
            excess += max(0.0, load - target)
    return excess / load_FG.shape[0]


@numba.njit(cache=True)
def _serve(load_FG, share_FE, spread_EG, e, new_G):  # type: ignore[no-untyped-def]
    """Expert e is served as new_G from now on."""
    for f in range(load_FG.shape[0]):
        for g in range(load_FG.shape[1]):
            load_FG[f, g] += share_FE[f, e] * (new_G[g] - spread_EG[e, g])
    spread_EG[e] = new_G


@numba.njit(cache=True)
def add_replicas(local_EG, load_FE, holds_EG, free_G, weight, target):  # type: ignore[no-untyped-def]
    """Fill the free slots: holds_EG (bool [E, G]) is updated in place; free_G [G] slots left on each rank.

    Each time the pair (expert, rank) of the largest gain in J; it is taken even at a loss: an engine wants every slot
    filled, and an unused replica costs only memory.
    """
    experts, ranks = local_EG.shape
    total = max(float(local_EG.sum()), 1.0)
    share_FE = in_means(load_FE, ranks)
    spread_EG, load_FG = expected_loads(local_EG, load_FE, holds_EG)
    new_G = np.empty(ranks, dtype=np.float64)
    while free_G.sum() > 0:
        best, best_e, best_g = -1e30, -1, -1
        for e in range(experts):
            for g in range(ranks):
                if free_G[g] <= 0 or holds_EG[e, g]:
                    continue
                holds_EG[e, g] = True
                spread(local_EG, holds_EG, e, new_G)
                holds_EG[e, g] = False
                after = _overload_with(load_FG, share_FE, spread_EG, e, new_G, -1, new_G, target)
                gain = local_EG[e, g] / total - weight * after
                if gain > best:
                    best, best_e, best_g = gain, e, g
        if best_e < 0:  # every rank with room already holds every expert
            break
        holds_EG[best_e, best_g] = True
        free_G[best_g] -= 1
        spread(local_EG, holds_EG, best_e, new_G)
        _serve(load_FG, share_FE, spread_EG, best_e, new_G)


@numba.njit(cache=True)
def trade(local_EG, load_FE, holds_EG, weight, target):  # type: ignore[no-untyped-def]
    """Change hands in place, each slot in turn to its best offer, until none raises J."""
    experts, ranks = local_EG.shape
    total = max(float(local_EG.sum()), 1.0)
    share_FE = in_means(load_FE, ranks)
    spread_EG, load_FG = expected_loads(local_EG, load_FE, holds_EG)
    new_a_G, new_b_G = np.empty(ranks, dtype=np.float64), np.empty(ranks, dtype=np.float64)
    improved = True
    while improved:
        improved = False
        for here in range(ranks):
            for a in range(experts):
                if not holds_EG[a, here]:
                    continue
                now = overload(load_FG, target)
                best, best_b, best_there = 1e-9, -1, -1
                for there in range(-1, ranks):  # -1: the copy of a is given up
                    if there == here or (there < 0 and holds_EG[a].sum() == 1) or (there >= 0 and holds_EG[a, there]):
                        continue
                    holds_EG[a, here] = False
                    if there >= 0:
                        holds_EG[a, there] = True
                    spread(local_EG, holds_EG, a, new_a_G)
                    holds_EG[a, here] = True
                    if there >= 0:
                        holds_EG[a, there] = False
                    for b in range(experts):
                        if b == a or holds_EG[b, here] or (there >= 0 and not holds_EG[b, there]):
                            continue
                        served = local_EG[b, here] - local_EG[a, here]
                        holds_EG[b, here] = True
                        if there >= 0:
                            holds_EG[b, there] = False
                            served += local_EG[a, there] - local_EG[b, there]
                        spread(local_EG, holds_EG, b, new_b_G)
                        holds_EG[b, here] = False
                        if there >= 0:
                            holds_EG[b, there] = True
                        gain = served / total
                        if weight > 0:
                            after = _overload_with(load_FG, share_FE, spread_EG, a, new_a_G, b, new_b_G, target)
                            gain -= weight * (after - now)
                        if gain > best:
                            best, best_b, best_there = gain, b, there
                if best_b < 0:
                    continue
                holds_EG[a, here], holds_EG[best_b, here] = False, True
                if best_there >= 0:
                    holds_EG[a, best_there], holds_EG[best_b, best_there] = True, False
                for e in (a, best_b):
                    spread(local_EG, holds_EG, e, new_a_G)
                    _serve(load_FG, share_FE, spread_EG, e, new_a_G)
                improved = True
