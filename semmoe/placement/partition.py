"""Balanced partition of a weighted graph: groups of bounded size with the most edge weight inside.

Pair exchanges (a trade with an empty place is a move) from several starts, later ones shuffling part of the best.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


def kept(weight_EE: NDArray[np.floating], group_E: NDArray[np.integer]) -> float:
    """Weight of the edges inside groups, each once; the diagonal counts nothing."""
    same = group_E[:, None] == group_E[None, :]
    np.fill_diagonal(same, False)
    return float(weight_EE[same].sum() / 2)


@numba.njit(cache=True, nogil=True)
def improve(weight_EE, group_N, groups, fewest):  # type: ignore[no-untyped-def]
    """Trade places between groups (group_N in place), each item with its best partner, until the kept weight is stuck.

    Items beyond the E of weight_EE are empty places; no group keeps fewer than `fewest` real items.
    """
    experts, items = weight_EE.shape[0], len(group_N)
    pull_NG = np.zeros((items, groups))
    real_G = np.zeros(groups, dtype=np.int64)
    for e in range(experts):
        real_G[group_N[e]] += 1
        for f in range(experts):
            if e != f:
                pull_NG[e, group_N[f]] += weight_EE[e, f]
    least = 1e-9 * (1.0 + np.abs(weight_EE).sum() / items)
    improved = True
    while improved:
        improved = False
        for a in range(experts):
            here = group_N[a]
            partner, best = -1, least
            for b in range(items):
                there = group_N[b]
                if there == here or (b >= experts and real_G[here] <= fewest):
                    continue
                gain = pull_NG[a, there] - pull_NG[a, here] + pull_NG[b, here] - pull_NG[b, there]
                if b < experts:
                    gain -= 2.0 * weight_EE[a, b]
                if gain > best:
                    partner, best = b, gain
            if partner < 0:
                continue
            there = group_N[partner]
            for e in range(experts):
                shift = 0.0
                if e != partner and partner < experts:
                    shift += weight_EE[e, partner]
                if e != a:
                    shift -= weight_EE[e, a]
                pull_NG[e, here] += shift
                pull_NG[e, there] -= shift
            if partner >= experts:
                real_G[here] -= 1
                real_G[there] += 1
            group_N[a], group_N[partner] = there, here
            improved = True


@numba.njit(cache=True)
def polish(weight_EE, group_N, groups, fewest, kicks, seed):  # type: ignore[no-untyped-def]
    """Improve group_N in place, then `kicks` times shuffle a few items of the best and improve again."""
    np.random.seed(seed)
    experts = weight_EE.shape[0]
    improve(weight_EE, group_N, groups, fewest)
    best_N, best = group_N.copy(), _kept(weight_EE, group_N)
    for kick in range(kicks):
        group_N[:] = best_N
        for _ in range(1 + kick % 3 + experts // 24):
            a, b = np.random.randint(experts), np.random.randint(len(group_N))
            if b < experts or (group_N[:experts] == group_N[a]).sum() > fewest:
                group_N[a], group_N[b] = group_N[b], group_N[a]
        improve(weight_EE, group_N, groups, fewest)
        now = _kept(weight_EE, group_N)
        if now >= best:
            best = now
            best_N[:] = group_N
    group_N[:] = best_N


@numba.njit(cache=True)
def _kept(weight_EE, group_N):  # type: ignore[no-untyped-def]
    total = 0.0
    for e in range(weight_EE.shape[0]):
        for f in range(e):
            if group_N[e] == group_N[f]:
                total += weight_EE[e, f]
    return total
