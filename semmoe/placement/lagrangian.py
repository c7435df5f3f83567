"""Upper bounds on the assignments that any placement can serve at home (program.py), where enumeration is too large.

Column bound: relax "each expert on one rank" with prices p_e and "each item on one rank" with prices s_u >= 0. All ranks
then face the same question, so relabelling them cannot weaken the bound:
    bound = sum p + sum s + G * max over sets S of E / G experts and Y of items that fit of
            (sum_{u in Y, e in S} counts[u, e] - p(S) - s(Y)),
least over the prices. Prices come from cutting planes (HiGHS), each step taken halfway to the best prices so far. The sets
that cut come from a local search while it finds any; only then does the inner maximum enumerate all sets S, which proves the
bound. Layers with shared homes are bounded one by one, which is weaker.
Spectral bound (any size, shared homes included): the placement and its homes are two scaled orthonormal families, so
what exceeds total / G is at most sqrt(capacity * L * E / G) times the G - 1 largest singular values of the counts,
rows divided by sqrt(weight) and centred per layer.
Row bound: every item could choose its own best E / G experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from .program import Program
from .search_clock import search_s

WORK_PER_STEP = 4e9  # item additions of one enumeration of sets: about two seconds
STARTS, MOST_KNOWN = 64, 256  # random and known sets that a local search starts from


@dataclass(frozen=True)
class Bound:
    """bound: no placement has more assignments at home; method: which of the three it is; steps of cutting planes."""

    bound: float
    method: str
    steps: int


def upper_bound(program: Program, time_limit_s: float = 30.0, value: float = 0.0) -> Bound:
    """The least bound found within the time limit. value: a known placement's value; stops when it is met."""
    found = [Bound(row_bound(program), "row", 0), Bound(spectral_bound(program), "spectral", 0)]
    layers, items, experts = program.counts_LUE.shape
    if math.comb(experts, experts // program.ranks) * items <= WORK_PER_STEP:
        parts = [
            column_bound(program.counts_LUE[layer], program, time_limit_s / layers, value if layers == 1 else 0.0)
            for layer in range(layers)
        ]
        found.append(Bound(sum(b for b, _ in parts), "column", sum(n for _, n in parts)))
    best = min(found, key=lambda b: b.bound)
    return Bound(float(np.floor(best.bound + 1e-6)), best.method, best.steps)


def row_bound(program: Program) -> float:
    """Every item alone with its best E / G experts in every layer."""
    size = program.experts // program.ranks
    return float(np.sort(program.counts_LUE, axis=2)[:, :, -size:].sum())


def spectral_bound(program: Program) -> float:
    layers, items, experts = program.counts_LUE.shape
    counts = program.counts_LUE.astype(np.float64)
    centred = counts - counts.mean(axis=2, keepdims=True)
    wide = centred.transpose(1, 0, 2).reshape(items, layers * experts) / np.sqrt(program.weight_U)[:, None]
    largest = np.linalg.svd(wide, compute_uv=False)[: program.ranks - 1]
    reach = math.sqrt(program.capacity * layers * experts / program.ranks)
    return float(program.total / program.ranks + reach * largest.sum())


def column_bound(
    counts_UE: NDArray[np.int64], program: Program, time_limit_s: float, value: float = 0.0, tolerance: float = 1e-4
) -> tuple[float, int]:
    """(bound of one layer, steps). Stops at the time limit, at `value`, or within `tolerance` of the best bound; the last
    enumeration may end after the limit."""
    items, experts = counts_UE.shape
    ranks, size = program.ranks, experts // program.ranks
    data, weight_U, capacity = (
        counts_UE.astype(np.float64),
        program.weight_U.astype(np.float64),
        float(program.capacity),
    )
    single = Program(counts_UE[None], program.weight_U, ranks, program.capacity)
    rng = np.random.default_rng(0)
    _, rank_LE = single.alternate(4, rng) if program.equal_weights else (0, _by_load(single))
    score_UG = single.scores_UG(rank_LE)
    home_U = score_UG.argmax(axis=1)
    local_E = np.array([counts_UE[home_U == rank_LE[0, e], e].sum() for e in range(experts)])
    prices = np.concatenate([local_E / 2, score_UG.max(axis=1) / 2]).astype(np.float64)  # its own columns are worth 0
    known = (rank_LE[0] == np.arange(ranks)[:, None]).astype(np.float64)
    until = search_s() + time_limit_s
    best, steps, lower = np.inf, 0, 0.0
    centre, least = prices, np.inf  # prices of the least bound, as far as the local search can tell
    sets: list[NDArray[np.float64]] = []
    worth: list[NDArray[np.float64]] = []
    while True:
        steps += 1
        over = search_s() > until
        starts = np.vstack([known, _random_sets(STARTS, experts, size, rng)])
        net, taken, member = good_sets(data, prices[:experts], prices[experts:], weight_U, capacity, starts)
        guess = prices.sum() + ranks * max(0.0, net.max())
        if guess < least:
            centre, least = prices, guess
        if over or guess - lower <= tolerance * guess:  # the search finds nothing more: prove it
            prices = centre
            net, taken, member = best_sets(data, prices[:experts], prices[experts:], weight_U, size, capacity)
            best = min(best, prices.sum() + ranks * max(0.0, net.max()))
            least = best
            if over or best < value + 1 or best - lower <= tolerance * best:
                break
        ok = np.isfinite(net)
        sets.append(np.hstack([member[ok], taken[ok]]))
        worth.append(np.einsum("ke,ue,ku->k", member[ok], data, taken[ok]))
        known = np.unique(np.vstack([known, member[ok]]), axis=0)[-MOST_KNOWN:]
        cuts, right = np.vstack(sets), np.concatenate(worth)
        answer = linprog(
            np.concatenate([np.ones(experts + items), [ranks]]),
            A_ub=-np.hstack([cuts, np.ones((len(cuts), 1))]),
            b_ub=-right,
            bounds=(0, None),
            method="highs",
        )
        if answer.status != 0:
            break
        lower = answer.fun
        prices = 0.5 * centre + 0.5 * answer.x[:-1]
    return float(best), steps


def _random_sets(count: int, experts: int, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """member_SE of random sets."""
    return (rng.random((count, experts)).argsort(axis=1) < size).astype(np.float64)


def _by_load(program: Program) -> NDArray[np.int64]:
    order = np.argsort(-program.counts_LUE.sum(axis=1), axis=1)
    rank_LE = np.empty_like(order)
    np.put_along_axis(rank_LE, order, np.broadcast_to(np.arange(program.experts) % program.ranks, order.shape), axis=1)
    return rank_LE


@numba.njit(cache=True)
def good_sets(counts_UE, price_E, price_U, weight_U, capacity, start_SE):  # type: ignore[no-untyped-def]
    """(net_S, taken_SU, member_SE) of sets found from each start by choosing items for the set and a set for the items in
    turn, to a local maximum of best_sets' net."""
    starts, experts = start_SE.shape
    items = len(counts_UE)
    net_S, taken_SU, member_SE = np.full(starts, -np.inf), np.zeros((starts, items)), start_SE.copy()
    gain_U, part_U, gain_E = np.empty(items), np.empty(items), np.empty(experts)
    for s in range(starts):
        size = int(start_SE[s].sum())
        member_E = start_SE[s].copy()
        while True:
            net = 0.0
            for u in range(items):
                gain_U[u] = (counts_UE[u] * member_E).sum() - price_U[u]
            net = fill(gain_U, weight_U, capacity, part_U) - (price_E * member_E).sum()
            if net <= net_S[s] + 1e-9:
                break
            net_S[s], taken_SU[s], member_SE[s] = net, part_U, member_E
            for e in range(experts):
                gain_E[e] = (counts_UE[:, e] * part_U).sum() - price_E[e]
            member_E[:] = 0.0
            member_E[np.argsort(-gain_E)[:size]] = 1.0
    return net_S, taken_SU, member_SE


@numba.njit(cache=True, fastmath={"reassoc", "contract"})
def best_sets(counts_UE, price_E, price_U, weight_U, size, capacity):  # type: ignore[no-untyped-def]
    """(net_E, taken_EU, member_EE): for every expert e the best set whose smallest expert it is, and its items.

    net = sum over chosen items of (counts on the set - price of the item) - prices of the set; -inf where e starts none.
    Items whose weights exceed the capacity together are cut off at it, the last one in part: an upper bound.
    """
    items, experts = counts_UE.shape
    net_E = np.full(experts, -np.inf)
    taken_EU = np.zeros((experts, items), dtype=np.float64)
    member_EE = np.zeros((experts, experts), dtype=np.float64)
    column_EU = np.ascontiguousarray(counts_UE.T)
    sums = np.zeros((size + 1, items), dtype=np.float64)  # counts on the first d experts of the set, less item prices
    cost = np.zeros(size + 1, dtype=np.float64)
    chosen = np.full(size, -1, dtype=np.int64)
    gain_U = np.empty(items, dtype=np.float64)
    part_U = np.empty(items, dtype=np.float64)
    for u in range(items):
        sums[0, u] = -price_U[u]
    depth, step = 0, 0.0  # step: price of capacity
    while depth >= 0:
        chosen[depth] += 1
        e = chosen[depth]
        if e > experts - (size - depth):
            depth -= 1
            continue
        cost[depth + 1] = cost[depth] + price_E[e]
        if depth < size - 1:
            for u in range(items):
                sums[depth + 1, u] = sums[depth, u] + column_EU[e, u]
            depth += 1
            chosen[depth] = e
            continue
        first = chosen[0]
        reach = step * capacity - cost[size]  # no set has more, whatever the step >= 0 is
        for u in range(items):
            over = sums[depth, u] + column_EU[e, u] - step * weight_U[u]
            reach += over if over > 0 else 0.0
        if reach <= net_E[first]:
            continue
        load = 0.0
        for u in range(items):
            gain_U[u] = sums[depth, u] + column_EU[e, u]
            load += weight_U[u] if gain_U[u] > 0 else 0.0
        net = fill(gain_U, weight_U, capacity, part_U) - cost[size]
        step = 0.0
        if load > capacity:  # of the last item that went in: nearby sets reach little more than this one with it
            for u in range(items):
                ratio = gain_U[u] / weight_U[u]
                if part_U[u] > 0 and (step == 0.0 or ratio < step):
                    step = ratio
        if net <= net_E[first]:
            continue
        net_E[first] = net
        taken_EU[first] = part_U
        member_EE[first] = 0.0
        for i in range(size):
            member_EE[first, chosen[i]] = 1.0
    return net_E, taken_EU, member_EE


@numba.njit(cache=True)
def fill(gain_U, weight_U, capacity, part_U):  # type: ignore[no-untyped-def]
    """Largest gain of items within the capacity, best gain per weight first; whole items where they weigh the same."""
    equal = weight_U.min() == weight_U.max()
    left, net = capacity, 0.0
    part_U[:] = 0.0
    for u in np.argsort(-gain_U / weight_U):
        if gain_U[u] <= 0:
            break
        share = min(1.0, left / weight_U[u])
        if share < 1.0 and equal:
            break
        part_U[u] = share
        net += share * gain_U[u]
        left -= share * weight_U[u]
        if left <= 0:
            break
    return net
