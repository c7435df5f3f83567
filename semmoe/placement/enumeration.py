"""Enumeration of the placements of a few experts, cut by Lagrangian bounds.

A placement of layer 0 counts once per relabelling of the ranks; later layers in every labelling, for the homes are
shared. Depth first over layers: what an item can still win in the layers below is at most its best there.
A full placement is discarded if, for some prices m_g >= 0 on home capacity,
    sum_u max_g (score[u, g] - m_g weight[u]) + capacity sum_g m_g <= incumbent.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from ..assign import capped_owners
from ..errors import UserError


def placements(experts: int, ranks: int, labelled: bool, most: int = 400_000) -> NDArray[np.int8]:
    """[N, E] all ways to give each rank E / G experts; unlabelled: ranks numbered by their smallest expert.

    Worked example: 4 experts on 2 ranks are [0,0,1,1], [0,1,0,1], [0,1,1,0] unlabelled, and 6 ways labelled.
    UserError where there are more than `most`.
    """
    ways = math.factorial(experts) // math.factorial(experts // ranks) ** ranks
    ways = ways if labelled else ways // math.factorial(ranks)
    if ways > most:
        raise UserError(
            f"{experts} experts on {ranks} ranks have {ways} placements, more than {most}: too many to prove an "
            "optimum; use `semantic` and the bound of placement/lagrangian.py"
        )
    return _placements(experts, ranks, labelled, ways)


@numba.njit(cache=True)
def _placements(experts, ranks, labelled, ways):  # type: ignore[no-untyped-def]
    table = np.empty((ways, experts), dtype=np.int8)
    rank_E = np.full(experts, -1, dtype=np.int64)
    count_G = np.zeros(ranks, dtype=np.int64)
    found, e = 0, 0
    while e >= 0:
        if rank_E[e] >= 0:
            count_G[rank_E[e]] -= 1
        rank_E[e] += 1
        limit = ranks
        if not labelled:  # a new rank may be opened only in order
            limit = 1
            for r in range(ranks):
                if count_G[r] > 0:
                    limit = r + 2
            limit = min(limit, ranks)
        while rank_E[e] < limit and count_G[rank_E[e]] == experts // ranks:
            rank_E[e] += 1
        if rank_E[e] >= limit:
            rank_E[e] = -1
            e -= 1
            continue
        count_G[rank_E[e]] += 1
        if e == experts - 1:
            for i in range(experts):
                table[found, i] = rank_E[i]
            found += 1
        else:
            e += 1
    return table


@numba.njit(cache=True)
def survivors(score_LNUG, first, weight_U, capacity, incumbent, equal, steps, keep):  # type: ignore[no-untyped-def]
    """(value, best_L, kept_KL, bound_K, seen): search all combinations of placements of the layers.

    score_LNUG: score of item u on rank g under placement n of layer l; layer 0 runs over the first `first` only.
    equal: items weigh the same, and every survivor is solved here, exactly; otherwise survivors are returned with
    their bounds (at most `keep`; seen > keep says that some were lost).
    """
    layers, ways, items, ranks = score_LNUG.shape
    rest_LU = np.zeros((layers + 1, items), dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        for u in range(items):
            most = 0
            for n in range(first if layer == 0 else ways):
                for g in range(ranks):
                    most = max(most, score_LNUG[layer, n, u, g])
            rest_LU[layer, u] = rest_LU[layer + 1, u] + most
    at_L = np.full(layers, -1, dtype=np.int64)
    best_L = np.zeros(layers, dtype=np.int64)
    total = np.zeros((layers + 1, items, ranks), dtype=np.int64)
    kept = np.empty((keep, layers), dtype=np.int64)
    bounds = np.empty(keep, dtype=np.float64)
    room = np.full(ranks, capacity // weight_U[0], dtype=np.int64)
    price_G = np.zeros(ranks, dtype=np.float64)
    best, seen, layer = incumbent, 0, 0
    while layer >= 0:
        at_L[layer] += 1
        if at_L[layer] == (first if layer == 0 else ways):
            at_L[layer] = -1
            layer -= 1
            continue
        optimistic = 0
        for u in range(items):
            most = 0
            for g in range(ranks):
                now = total[layer, u, g] + score_LNUG[layer, at_L[layer], u, g]
                total[layer + 1, u, g] = now
                most = max(most, now)
            optimistic += most + rest_LU[layer + 1, u]
        if optimistic <= best:
            continue
        if layer < layers - 1:
            layer += 1
            continue
        bound = price_bound(total[layers], weight_U, capacity, best, steps, price_G)
        if bound < best + 1 - 1e-6:
            continue
        if equal:
            score_UG = total[layers].astype(np.int32)
            home_U = capped_owners(score_UG, room)
            value = 0
            for u in range(items):
                value += score_UG[u, home_U[u]]
            if value > best:
                best = value
                best_L[:] = at_L
                seen += 1
        else:
            if seen < keep:
                kept[seen] = at_L
                bounds[seen] = bound
            seen += 1
    return best, best_L, kept[: min(seen, keep)], bounds[: min(seen, keep)], seen


@numba.njit(cache=True)
def price_bound(score_UG, weight_U, capacity, incumbent, steps, price_G):  # type: ignore[no-untyped-def]
    """Least Lagrangian bound found in `steps` subgradient steps; stops once the placement is ruled out."""
    items, ranks = score_UG.shape
    price_G[:] = 0.0
    load_G = np.empty(ranks, dtype=np.float64)
    best = np.inf
    for step in range(steps):
        bound = 0.0
        for g in range(ranks):
            load_G[g] = 0.0
            bound += capacity * price_G[g]
        for u in range(items):
            at, most = 0, -np.inf
            for g in range(ranks):
                net = score_UG[u, g] - price_G[g] * weight_U[u]
                if net > most:
                    at, most = g, net
            load_G[at] += weight_U[u]
            bound += most
        best = min(best, bound)
        if best < incumbent + 1 - 1e-6:
            break
        square = 0.0
        for g in range(ranks):
            over = load_G[g] - capacity
            if over > 0 or price_G[g] > 0:
                square += over * over
        if square == 0.0:
            break
        size = (bound - incumbent) / square * (0.5 + 0.5 / (1 + step))
        for g in range(ranks):
            price_G[g] = max(0.0, price_G[g] + size * (load_G[g] - capacity))
    return best
