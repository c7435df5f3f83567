"""Experts to ranks, given how much traffic each expert draws from each home rank.

Maximise the value J = (assignments served at home) / (all assignments) - weight * overload: exact equal-quota
assignment for the first term, then the best pair exchanges on the whole of J.

overload = mean over folds f of sum_g max(0, load_fg / mean_g load_fg - target). The folds are disjoint groups of
training requests: a placement balanced over all of them together can still be uneven on each, and then it is uneven
on the next requests too.
"""

from __future__ import annotations

import numba
import numpy as np

from ..assign import capped_owners


@numba.njit(cache=True)
def overload(load_FG, target):  # type: ignore[no-untyped-def]
    """The overload of loads [F, G] in units of a rank's mean; a fold without load counts 0."""
    folds, ranks = load_FG.shape
    excess = 0.0
    for f in range(folds):
        mean = load_FG[f].sum() / ranks
        if mean > 0:
            for g in range(ranks):
                excess += max(0.0, load_FG[f, g] / mean - target)
    return excess / folds


@numba.njit(cache=True)
def rank_loads(load_FE, rank_E, ranks):  # type: ignore[no-untyped-def]
    """load_FG [F, G]: expert loads summed by rank."""
    load_FG = np.zeros((load_FE.shape[0], ranks), dtype=np.float64)
    for f in range(load_FE.shape[0]):
        for e in range(len(rank_E)):
            load_FG[f, rank_E[e]] += load_FE[f, e]
    return load_FG


@numba.njit(cache=True)
def value(local_EG, load_FE, rank_E, weight, target):  # type: ignore[no-untyped-def]
    """J of the experts at rank_E; local_EG [E, G] assignments to e from tokens at home g, load_FE per fold of requests."""
    served, total = 0.0, 0.0
    for e in range(len(rank_E)):
        served += local_EG[e, rank_E[e]]
        for g in range(local_EG.shape[1]):
            total += local_EG[e, g]
    return served / max(total, 1.0) - weight * overload(rank_loads(load_FE, rank_E, local_EG.shape[1]), target)


@numba.njit(cache=True)
def exchange(local_EG, load_FE, rank_E, weight, target):  # type: ignore[no-untyped-def]
    """Improve rank_E in place: each expert in turn trades places with its best partner until no trade raises J."""
    experts, ranks = local_EG.shape
    folds = load_FE.shape[0]
    total = max(float(local_EG.sum()), 1.0)
    share_FE = np.empty((folds, experts), dtype=np.float64)  # in units of a rank's mean load
    for f in range(folds):
        share_FE[f] = load_FE[f] * (ranks / max(load_FE[f].sum(), 1.0))
    load_FG = rank_loads(share_FE, rank_E, ranks)
    improved = True
    while improved:
        improved = False
        for a in range(experts):
            here = rank_E[a]
            partner, best = -1, 1e-9
            for b in range(experts):
                there = rank_E[b]
                if there == here:
                    continue
                gain = local_EG[a, there] + local_EG[b, here] - local_EG[a, here] - local_EG[b, there]
                delta = gain / total
                if weight > 0:
                    change = 0.0
                    for f in range(folds):
                        shift = share_FE[f, a] - share_FE[f, b]
                        at_here, at_there = load_FG[f, here] - target, load_FG[f, there] - target
                        change += max(0.0, at_here - shift) + max(0.0, at_there + shift)
                        change -= max(0.0, at_here) + max(0.0, at_there)
                    delta -= weight * change / folds
                if delta > best:
                    partner, best = b, delta
            if partner >= 0:
                there = rank_E[partner]
                for f in range(folds):
                    shift = share_FE[f, a] - share_FE[f, partner]
                    load_FG[f, here] -= shift
                    load_FG[f, there] += shift
                rank_E[a], rank_E[partner] = there, here
                improved = True


@numba.njit(cache=True)
def best_experts(local_EG, load_FE, weight, target):  # type: ignore[no-untyped-def]
    """rank_E [E] for given homes, E / G experts a rank: exact on the served share, then exchanges on J."""
    experts, ranks = local_EG.shape
    shift = 0
    while (local_EG.max() >> shift) >= 2**31:
        shift += 1
    scaled = (local_EG >> shift).astype(np.int32)
    rank_E = capped_owners(scaled, np.full(ranks, experts // ranks, dtype=np.int64))
    exchange(local_EG, load_FE, rank_E, weight, target)
    return rank_E
