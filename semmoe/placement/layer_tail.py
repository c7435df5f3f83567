"""Clusters of consecutive layers to ranks for the least tail traffic: the second program of moetuner.py.

minimise sum_l max over g1 != g2 of flow_l(cluster at g1, next layer's cluster at g2) * slowness(g1, g2)
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp

from .search_clock import search_s


def tail_cost(
    flow_CC: NDArray[np.float64],
    before_C: NDArray[np.integer],
    after_C: NDArray[np.integer],
    slow_GG: NDArray[np.float64],
) -> float:
    """The largest flow over one pair of different ranks, in units of the fastest link."""
    return float((flow_CC * slow_GG[before_C][:, after_C]).max(initial=0.0))


def least_tail(
    flows: list[NDArray[np.float64]], slow_GG: NDArray[np.float64], until: float
) -> tuple[NDArray[np.int64], float, float]:
    """(rank_LC, tail, lower bound): clusters of every layer to ranks for the least sum of tails over boundaries."""
    ranks = len(slow_GG)
    rank_LC = np.tile(np.arange(ranks), (len(flows) + 1, 1))
    bound = 0.0
    for i, flow_CC in enumerate(flows):
        cost_CG = (flow_CC[:, :, None] * slow_GG[rank_LC[i]][:, None, :]).max(axis=0)
        remote_CG = np.einsum("cd,cg->dg", flow_CC, slow_GG[rank_LC[i]])
        rank_LC[i + 1] = bottleneck(cost_CG, remote_CG)
        fast_GG = np.minimum(slow_GG, 1.0)  # as if every link were the fastest: a bound, exact on one node
        apart_CG = (flow_CC[:, :, None] * fast_GG[:, None, :]).max(axis=0)
        bound += float(apart_CG[np.arange(ranks), bottleneck(apart_CG, apart_CG)].max())
    tail = sum(tail_cost(flow, rank_LC[i], rank_LC[i + 1], slow_GG) for i, flow in enumerate(flows))
    if len(np.unique(slow_GG[slow_GG > 0])) < 2:
        return rank_LC, tail, tail
    search_tail(np.stack(flows), slow_GG, rank_LC, 40 * len(rank_LC), 0)
    improved = True
    while improved and search_s() < until:
        improved = False
        for layer in range(len(rank_LC)):
            costs = []
            if layer > 0:
                costs.append((flows[layer - 1][:, :, None] * slow_GG[rank_LC[layer - 1]][:, None, :]).max(axis=0))
            if layer < len(flows):
                costs.append((flows[layer][:, :, None] * slow_GG[:, rank_LC[layer + 1]].T[None]).max(axis=1))
            order = np.arange(ranks)
            now = sum(float(c[order, rank_LC[layer]].max()) for c in costs)
            fresh_C = _two_tails(costs, max(min(2.0, until - search_s()), 0.05))
            if fresh_C is not None and sum(float(c[order, fresh_C].max()) for c in costs) < now * (1 - 1e-9):
                rank_LC[layer], improved = fresh_C, True
            if search_s() > until:
                break
    tail = sum(tail_cost(flow, rank_LC[i], rank_LC[i + 1], slow_GG) for i, flow in enumerate(flows))
    return rank_LC, tail, min(bound, tail)


def bottleneck(cost_CG: NDArray[np.float64], remote_CG: NDArray[np.float64]) -> NDArray[np.int64]:
    """rank_C: the permutation with the least largest cost, among those the least summed remote flow (both exact)."""
    levels = np.unique(cost_CG)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        banned = (cost_CG > levels[middle]).astype(float)
        row, column = linear_sum_assignment(banned)
        low, high = (low, middle) if banned[row, column].sum() == 0 else (middle + 1, high)
    allowed = np.where(cost_CG <= levels[low], remote_CG, 1.0 + remote_CG.sum())
    _, column = linear_sum_assignment(allowed)
    return column.astype(np.int64)


def _two_tails(costs: list[NDArray[np.float64]], time_limit_s: float) -> NDArray[np.int64] | None:
    """HiGHS: the permutation with the least sum of the largest costs of up to two tables."""
    ranks, tables = len(costs[0]), len(costs)
    binaries = ranks * ranks
    rows = np.kron(np.eye(ranks), np.ones(ranks))
    columns = np.kron(np.ones(ranks), np.eye(ranks))
    free = np.zeros((ranks, tables))
    constraints = [LinearConstraint(np.hstack([side, free]), 1, 1) for side in (rows, columns)]
    for t, cost_CG in enumerate(costs):
        limit = free.copy()
        limit[:, t] = -1.0
        constraints.append(LinearConstraint(np.hstack([rows * cost_CG.ravel(), limit]), -np.inf, 0))
    answer = milp(
        np.concatenate([np.zeros(binaries), np.ones(tables)]),
        constraints=constraints,
        integrality=np.concatenate([np.ones(binaries), np.zeros(tables)]),
        bounds=Bounds(0, np.concatenate([np.ones(binaries), np.full(tables, np.inf)])),
        options={"time_limit": time_limit_s},
    )
    return None if answer.x is None else answer.x[:binaries].reshape(ranks, ranks).argmax(axis=1).astype(np.int64)


@numba.njit(cache=True)
def boundary_tail(flow_CC, before_C, after_C, slow_GG):  # type: ignore[no-untyped-def]
    most = 0.0
    for c in range(len(before_C)):
        for d in range(len(after_C)):
            most = max(most, flow_CC[c, d] * slow_GG[before_C[c], after_C[d]])
    return most


@numba.njit(cache=True)
def search_tail(flow_LCC, slow_GG, rank_LC, kicks, seed):  # type: ignore[no-untyped-def]
    """Exchange ranks of two clusters in one layer, or in it and all later ones, while the summed tail falls (in place)."""
    np.random.seed(seed)
    layers, ranks = rank_LC.shape
    tails = np.empty(layers - 1)
    for i in range(layers - 1):
        tails[i] = boundary_tail(flow_LCC[i], rank_LC[i], rank_LC[i + 1], slow_GG)
    best_LC, best = rank_LC.copy(), tails.sum()
    for kick in range(kicks + 1):
        if kick > 0:
            for _ in range(np.random.randint(1, 4)):
                layer, c, d = np.random.randint(layers), np.random.randint(ranks), np.random.randint(ranks)
                rank_LC[layer, c], rank_LC[layer, d] = rank_LC[layer, d], rank_LC[layer, c]
            for i in range(layers - 1):
                tails[i] = boundary_tail(flow_LCC[i], rank_LC[i], rank_LC[i + 1], slow_GG)
        improved = True
        while improved:
            improved = False
            for layer in range(layers):
                for g in range(ranks):
                    for h in range(g):
                        for suffix in range(2):
                            last = layers if suffix else layer + 1
                            swap_ranks(rank_LC, layer, last, g, h)
                            change, left, right = 0.0, 0.0, 0.0
                            if layer > 0:
                                before = rank_LC[layer - 1]
                                left = boundary_tail(flow_LCC[layer - 1], before, rank_LC[layer], slow_GG)
                                change += left - tails[layer - 1]
                            if layer < layers - 1:
                                right = boundary_tail(flow_LCC[layer], rank_LC[layer], rank_LC[layer + 1], slow_GG)
                                change += right - tails[layer]
                            later = 0.0
                            if suffix:  # names of ranks in different nodes are not alike
                                for i in range(layer + 1, layers - 1):
                                    later += boundary_tail(flow_LCC[i], rank_LC[i], rank_LC[i + 1], slow_GG) - tails[i]
                            if change + later < -1e-9 * (1.0 + best):
                                improved = True
                                for i in range(max(layer - 1, 0), layers - 1):
                                    tails[i] = boundary_tail(flow_LCC[i], rank_LC[i], rank_LC[i + 1], slow_GG)
                            else:
                                swap_ranks(rank_LC, layer, last, g, h)
        now = tails.sum()
        if now <= best:
            best = now
            best_LC[:] = rank_LC
        else:
            rank_LC[:] = best_LC
    rank_LC[:] = best_LC


@numba.njit(cache=True)
def swap_ranks(rank_LC, first, last, g, h):  # type: ignore[no-untyped-def]
    for layer in range(first, last):
        for c in range(rank_LC.shape[1]):
            rank = rank_LC[layer, c]
            if rank == g:
                rank_LC[layer, c] = h
            elif rank == h:
                rank_LC[layer, c] = g
