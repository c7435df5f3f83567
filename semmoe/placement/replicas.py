"""Free slots to replicas: greedily the (expert, rank) that serves the largest extra share at home, less new overload."""

from __future__ import annotations

import numba
import numpy as np

from .exchange import overload


@numba.njit(cache=True)
def expected_rows(local_EG, holds_EG):  # type: ignore[no-untyped-def]
    """rows_EG: rows of e on rank g when home replicas serve their own and the rest spreads evenly over the replicas."""
    experts, ranks = local_EG.shape
    rows = np.zeros((experts, ranks), dtype=np.float64)
    for e in range(experts):
        _rows_of(local_EG, holds_EG, e, -1, rows[e])
    return rows


@numba.njit(cache=True)
def _rows_of(local_EG, holds_EG, e, extra, rows_G):  # type: ignore[no-untyped-def]
    """The row of expected_rows for expert e, as if rank `extra` held it too (-1: as it is)."""
    ranks = local_EG.shape[1]
    remote, copies = 0.0, 0
    for g in range(ranks):
        if holds_EG[e, g] or g == extra:
            copies += 1
        else:
            remote += local_EG[e, g]
    for g in range(ranks):
        held = holds_EG[e, g] or g == extra
        rows_G[g] = local_EG[e, g] + remote / copies if held else 0.0


@numba.njit(cache=True)
def add_replicas(local_EG, holds_EG, free_G, weight, target):  # type: ignore[no-untyped-def]
    """Fill the free slots: holds_EG (bool [E, G]) is updated in place; free_G [G] slots left on each rank.

    A pair's gain is local_EG[e, g] / total - weight * (overload after - before), overload as in exchange.py. The best
    pair is taken even at a loss: an engine wants every slot filled, and an unused replica costs only memory.
    """
    experts, ranks = local_EG.shape
    total = max(float(local_EG.sum()), 1.0)
    rows_EG = expected_rows(local_EG, holds_EG)
    load_G = rows_EG.sum(axis=0)
    trial_G = np.empty(ranks, dtype=np.float64)
    row_G = np.empty(ranks, dtype=np.float64)
    left = free_G.sum()
    while left > 0:
        now = overload(load_G.reshape(1, ranks), target)
        best, best_e, best_g = -1e30, -1, -1
        for e in range(experts):
            for g in range(ranks):
                if free_G[g] <= 0 or holds_EG[e, g]:
                    continue
                _rows_of(local_EG, holds_EG, e, g, row_G)
                for r in range(ranks):
                    trial_G[r] = load_G[r] - rows_EG[e, r] + row_G[r]
                gain = local_EG[e, g] / total - weight * (overload(trial_G.reshape(1, ranks), target) - now)
                if gain > best:
                    best, best_e, best_g = gain, e, g
        if best_e < 0:  # every rank with room already holds every expert
            break
        _rows_of(local_EG, holds_EG, best_e, best_g, row_G)
        load_G += row_G - rows_EG[best_e]
        rows_EG[best_e] = row_G
        holds_EG[best_e, best_g] = True
        free_G[best_g] -= 1
        left -= 1
