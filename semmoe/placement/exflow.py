"""ExFlow: least rank changes of tokens between consecutive MoE layers, equal experts a rank and layer.

    minimise  sum_l sum_{e, f} transitions_l[e, f] * [rank_l(e) != rank_{l+1}(f)]
with transitions_l[e, f] the tokens that used e in layer l and f in the next. Two stages: experts to nodes, then to ranks
inside each node, so that slow links see the fewest changes. Each stage improves one layer at a time by an exact
assignment given its neighbours, and one boundary at a time by the exact relabelling of all later layers, from several
starts and after many small disturbances. Where a layer has few partitions, dynamic programming gives the optimum.
"""

from __future__ import annotations

import itertools
import math

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..assign import capped_owners
from ..errors import UserError
from .base import Placement, PlacementProblem
from .enumeration import placements
from .groups import most_a_rank, nodes_of, placed, with_phantoms
from .search_clock import search_s

FEW_PARTITIONS = 40


class ExFlow:
    """Experts where the tokens of the layer before sit (ExFlow): fewest rank changes between layers, nodes first.

    starts: random starts; kicks: disturbances per layer and start. Stops early at the problem's time limit.
    notes["stay_share"]: share of transitions that stay on a rank, notes["node_stay_share"] on a node.
    """

    def __init__(self, starts: int = 4, kicks: int = 40) -> None:
        if starts < 1 or kicks < 0:
            raise UserError(f"placement.starts={starts} must be at least 1 and placement.kicks={kicks} at least 0")
        self.starts, self.kicks = starts, kicks

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks, nodes = problem.profile, problem.ep_size, nodes_of(problem)
        wide = most_a_rank(profile.num_experts, ranks) * ranks
        flows = [with_phantoms(profile.transitions_EE(layer), wide) for layer in range(1, profile.num_layers)]
        flow_LEE = np.stack(flows) if flows else np.zeros((0, wide, wide), dtype=np.int64)
        until = search_s() + problem.time_limit_s
        rng = problem.rng()
        node_LE = np.zeros((profile.num_layers, wide), dtype=np.int64)
        if nodes > 1:
            first_stage = search_s() + problem.time_limit_s / 2
            node_LE = self._least_changes(flow_LEE, nodes, rng, first_stage)
        rank_LE = np.zeros_like(node_LE)
        per_node = ranks // nodes
        for node in range(nodes):
            inside_LE = np.stack([np.flatnonzero(row == node) for row in node_LE])
            within = [flow[np.ix_(inside_LE[i], inside_LE[i + 1])] for i, flow in enumerate(flow_LEE)]
            size = inside_LE.shape[1]
            part = np.stack(within) if within else np.zeros((0, size, size), dtype=np.int64)
            local_LE = self._least_changes(part, per_node, rng, until)
            np.put_along_axis(rank_LE, inside_LE, node * per_node + local_LE, axis=1)
        total = max(int(flow_LEE.sum()), 1)
        notes = {"stay_share": stays(flow_LEE, rank_LE) / total, "node_stay_share": stays(flow_LEE, node_LE) / total}
        return placed(rank_LE, problem, notes)

    def _least_changes(
        self, flow_LEE: NDArray[np.int64], groups: int, rng: np.random.Generator, until: float
    ) -> NDArray[np.int64]:
        layers, experts = len(flow_LEE) + 1, flow_LEE.shape[1]
        if count_partitions(experts, groups) <= FEW_PARTITIONS:
            return chain_optimum(flow_LEE, groups)
        shift = max(int(flow_LEE.max(initial=0) * 2 * experts).bit_length() - 31, 0)
        best_value, best_LE = -1, np.zeros((layers, experts), dtype=np.int64)
        for _ in range(self.starts):
            group_LE = np.stack([rng.permutation(np.arange(experts) % groups) for _ in range(layers)])
            for layer in range(1, layers):  # a chain: every layer follows the one before
                best_layer(flow_LEE, group_LE, layer, groups, False, shift)
            for _ in range(self.kicks):  # one kick a layer at a time, so that the time limit is kept
                shaken(flow_LEE, group_LE, groups, layers, int(rng.integers(1 << 31)), shift)
                relabel(flow_LEE, group_LE, groups)
                if search_s() > until:
                    break
            value = int(stays(flow_LEE, group_LE))
            if value > best_value:
                best_value, best_LE = value, group_LE
            if search_s() > until:
                break
        return best_LE


def relabel(flow_LEE: NDArray[np.int64], group_LE: NDArray[np.int64], groups: int) -> None:
    """Boundary by boundary, the best labels of all later layers relative to the ones before (exact, in place)."""
    for boundary in range(len(flow_LEE)):
        between_GG = group_flow(flow_LEE[boundary], group_LE[boundary], group_LE[boundary + 1], groups)
        row, column = linear_sum_assignment(-between_GG)
        label_G = np.empty(groups, dtype=np.int64)
        label_G[column] = row
        group_LE[boundary + 1 :] = label_G[group_LE[boundary + 1 :]]


def chain_optimum(flow_LEE: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """The optimum for few experts: labels are free along the chain, so the best way to reach each partition suffices."""
    ways_WE = placements(flow_LEE.shape[1], groups, False).astype(np.int64)
    value_W = np.zeros(len(ways_WE))
    came_from, labels = [], []
    hot_WEG = (ways_WE[:, :, None] == np.arange(groups)).astype(np.float64)
    for flow_EE in flow_LEE:
        between = np.einsum("aeg,ef,bfh->abgh", hot_WEG, flow_EE.astype(np.float64), hot_WEG, optimize=True)
        step = np.empty((len(ways_WE), len(ways_WE)))
        label_WWG = np.empty((len(ways_WE), len(ways_WE), groups), dtype=np.int64)
        for a in range(len(ways_WE)):
            for b in range(len(ways_WE)):
                row, column = linear_sum_assignment(-between[a, b])
                step[a, b] = between[a, b][row, column].sum()
                label_WWG[a, b, column] = row
        reach = value_W[:, None] + step
        came_from.append(reach.argmax(axis=0))
        labels.append(label_WWG)
        value_W = reach.max(axis=0)
    path = [int(value_W.argmax())]
    for back in reversed(came_from):
        path.insert(0, int(back[path[0]]))
    rows, label_G = [ways_WE[path[0]]], np.arange(groups)
    for layer, (a, b) in enumerate(itertools.pairwise(path)):
        label_G = label_G[labels[layer][a, b]]
        rows.append(label_G[ways_WE[b]])
    return np.stack(rows)


def count_partitions(experts: int, groups: int) -> float:
    """Ways to split experts into unnamed groups of equal size."""
    ways = math.lgamma(experts + 1) - groups * math.lgamma(experts // groups + 1) - math.lgamma(groups + 1)
    return math.exp(min(ways, 700.0))


def one_hot(group_E: NDArray[np.integer], groups: int) -> NDArray[np.float64]:
    return (group_E[:, None] == np.arange(groups)).astype(np.float64)


def group_flow(
    flow_EE: NDArray[np.integer], before_E: NDArray[np.integer], after_E: NDArray[np.integer], groups: int
) -> NDArray[np.float64]:
    """flow_GG: transitions from experts of each group to experts of each group of the next layer."""
    return one_hot(before_E, groups).T @ flow_EE @ one_hot(after_E, groups)


@numba.njit(cache=True)
def stays(flow_LEE, group_LE):  # type: ignore[no-untyped-def]
    """Transitions whose two experts share a group."""
    total = 0
    for layer in range(flow_LEE.shape[0]):
        for e in range(flow_LEE.shape[1]):
            for f in range(flow_LEE.shape[2]):
                if group_LE[layer, e] == group_LE[layer + 1, f]:
                    total += flow_LEE[layer, e, f]
    return total


@numba.njit(cache=True)
def best_layer(flow_LEE, group_LE, layer, groups, ahead, shift):  # type: ignore[no-untyped-def]
    """Give one layer (in place) the groups with the most transitions from before (and to the next); the gain."""
    layers, experts = group_LE.shape
    score_EG = np.zeros((experts, groups), dtype=np.int64)
    for e in range(experts):
        if layer > 0:
            for f in range(experts):
                score_EG[e, group_LE[layer - 1, f]] += flow_LEE[layer - 1, f, e]
        if ahead and layer < layers - 1:
            for f in range(experts):
                score_EG[e, group_LE[layer + 1, f]] += flow_LEE[layer, e, f]
    scaled = (score_EG >> shift).astype(np.int32)
    fresh = capped_owners(scaled, np.full(groups, experts // groups, dtype=np.int64))
    gain = 0
    for e in range(experts):
        gain += score_EG[e, fresh[e]] - score_EG[e, group_LE[layer, e]]
    if gain > 0 or not ahead:
        group_LE[layer] = fresh
    return gain


@numba.njit(cache=True)
def settle(flow_LEE, group_LE, groups, dirty_L, shift):  # type: ignore[no-untyped-def]
    """Re-solve the marked layers, and the neighbours of those that change, until none gains."""
    layers = group_LE.shape[0]
    busy = True
    while busy:
        busy = False
        for layer in range(layers):
            if not dirty_L[layer]:
                continue
            dirty_L[layer] = False
            if best_layer(flow_LEE, group_LE, layer, groups, True, shift) > 0:
                busy = True
                for other in (layer - 1, layer + 1):
                    if 0 <= other < layers:
                        dirty_L[other] = True


@numba.njit(cache=True)
def shaken(flow_LEE, group_LE, groups, kicks, seed, shift):  # type: ignore[no-untyped-def]
    """Settle, then `kicks` times disturb and settle again, keeping what is no worse (in place); transitions that stay."""
    np.random.seed(seed)
    layers, experts = group_LE.shape
    dirty_L = np.ones(layers, dtype=np.bool_)
    settle(flow_LEE, group_LE, groups, dirty_L, shift)
    best_LE, best = group_LE.copy(), stays(flow_LEE, group_LE)
    for _ in range(kicks):
        layer, kind = np.random.randint(layers), np.random.randint(3)
        last = layer  # the last layer that the kick changes
        if kind == 0:
            for _ in range(np.random.randint(1, 4)):
                a, b = np.random.randint(experts), np.random.randint(experts)
                group_LE[layer, a], group_LE[layer, b] = group_LE[layer, b], group_LE[layer, a]
        else:  # two groups trade an expert each, or their names, over a run of layers
            last = layers - 1 if kind == 1 else min(layers - 1, layer + np.random.randint(1, 4))
            g, h = np.random.randint(groups), np.random.randint(groups)
            for at in range(layer, last + 1):
                if kind == 1:
                    for e in range(experts):
                        group = group_LE[at, e]
                        group_LE[at, e] = h if group == g else (g if group == h else group)
                else:
                    a, b = np.random.randint(experts), np.random.randint(experts)
                    for _ in range(4 * groups):
                        if group_LE[at, a] == g and group_LE[at, b] == h:
                            break
                        a = np.random.randint(experts) if group_LE[at, a] != g else a
                        b = np.random.randint(experts) if group_LE[at, b] != h else b
                    group_LE[at, a], group_LE[at, b] = group_LE[at, b], group_LE[at, a]
        for other in (layer - 1, last + 1):
            if 0 <= other < layers:
                dirty_L[other] = True
        settle(flow_LEE, group_LE, groups, dirty_L, shift)
        for at in range(layer, last + 1):
            dirty_L[at] = True
        settle(flow_LEE, group_LE, groups, dirty_L, shift)
        now = stays(flow_LEE, group_LE)
        if now >= best:
            best = now
            best_LE[:] = group_LE
        else:
            group_LE[:] = best_LE
    return best
