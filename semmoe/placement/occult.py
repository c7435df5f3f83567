"""Occult's placement: balanced partition of the co-activation graph, so that a token's experts share ranks.

Edge (e, f) weighs the tokens that activated both. METIS (pymetis) cuts the graph where it is installed, otherwise
recursive Kernighan-Lin bisection (networkx); either way parts are then made exactly equal and improved by exchanges.
Fewer ranks a token means fewer copies sent: the source's measure of communication.
"""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ..assign import assign_equal, narrowed
from ..errors import UserError
from .base import Placement, PlacementProblem
from .groups import most_a_rank, placed, with_phantoms
from .partition import kept, polish

try:
    import pymetis
except ImportError:
    pymetis = None


class Occult:
    """Experts that tokens activate together on one rank, equally many on each (balanced graph partition).

    method: "metis", "kernighan_lin", or "auto" (METIS where pymetis is installed). kicks: shuffles of the final
    exchanges. notes["kept_share"]: share of co-activated pairs on one rank.
    """

    def __init__(self, method: str = "auto", kicks: int = 24) -> None:
        if method not in ("auto", "metis", "kernighan_lin"):
            raise UserError(f"placement.method='{method}' must be auto, metis or kernighan_lin")
        if method == "metis" and pymetis is None:
            raise UserError("placement.method=metis needs pymetis (pip install pymetis), or use kernighan_lin")
        if kicks < 0:
            raise UserError(f"placement.kicks={kicks} must be at least 0")
        self.kicks = kicks
        self.metis = method == "metis" or (method == "auto" and pymetis is not None)

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks = problem.profile, problem.ep_size
        wide = most_a_rank(profile.num_experts, ranks) * ranks
        rank_LE = np.zeros((profile.num_layers, wide), dtype=np.int64)
        kept_sum = total = 0.0
        for layer in range(profile.num_layers):
            weight_EE = with_phantoms(profile.coactivation_EE(layer).astype(np.float64), wide)
            np.fill_diagonal(weight_EE, 0.0)
            cut = metis_parts if self.metis else bisected
            rank_E = equal_parts(weight_EE, cut(weight_EE, ranks, problem.seed), ranks)
            polish(weight_EE, rank_E, ranks, wide // ranks, self.kicks, problem.seed)
            rank_LE[layer] = rank_E
            kept_sum += kept(weight_EE, rank_E)
            total += weight_EE.sum() / 2
        return placed(rank_LE, problem, {"kept_share": kept_sum / total if total else 1.0})


def metis_parts(weight_EE: NDArray[np.float64], parts: int, seed: int) -> NDArray[np.int64]:
    """Parts of nearly equal size by METIS's multilevel k-way cut."""
    experts = len(weight_EE)
    scaled = np.rint(weight_EE * (1e6 / max(weight_EE.max(), 1.0))).astype(np.int64)
    neighbours, weights = [], []
    for e in range(experts):
        others = np.flatnonzero((scaled[e] > 0) & (np.arange(experts) != e))
        neighbours.append(others)
        weights += scaled[e, others].tolist()
    options: Any = pymetis.Options(seed=seed, ufactor=1)
    _, part = pymetis.part_graph(parts, adjacency=neighbours, eweights=weights, options=options)
    return np.array(part, dtype=np.int64)


def bisected(weight_EE: NDArray[np.float64], parts: int, seed: int) -> NDArray[np.int64]:
    """Recursive Kernighan-Lin bisection; an odd number of parts is cut in the ratio of its halves."""
    part_E = np.zeros(len(weight_EE), dtype=np.int64)
    size = len(weight_EE) // parts
    work = [(np.random.default_rng(seed).permutation(len(weight_EE)), 0, parts)]
    while work:
        items, first, count = work.pop()
        if count == 1:
            part_E[items] = first
            continue
        left = count // 2
        halves = items[: left * size], items[left * size :]
        graph = nx.Graph()
        graph.add_nodes_from(items.tolist())
        pairs = [(int(e), int(f)) for i, e in enumerate(items) for f in items[:i] if weight_EE[e, f] > 0]
        graph.add_weighted_edges_from((e, f, weight_EE[e, f]) for e, f in pairs)
        if len(halves[0]) == len(halves[1]):
            start = tuple(set(half.tolist()) for half in halves)
            found = nx.algorithms.community.kernighan_lin_bisection(graph, start, seed=seed)
            halves = np.array(sorted(found[0])), np.array(sorted(found[1]))
        else:
            group = np.repeat([0, 1], [len(halves[0]), len(halves[1])])
            polish(weight_EE[np.ix_(items, items)], group, 2, 0, 8, seed)
            halves = items[group == 0], items[group == 1]
        work += [(halves[0], first, left), (halves[1], first + left, count - left)]
    return part_E


def equal_parts(weight_EE: NDArray[np.float64], part_E: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Exactly equal parts: experts to the parts that they are tied to most (exact assignment), if they are not equal."""
    if (np.bincount(part_E, minlength=parts) == len(part_E) // parts).all():
        return part_E.copy()
    pull_EG = weight_EE @ (part_E[:, None] == np.arange(parts)).astype(np.float64)
    pull_EG[np.arange(len(part_E)), part_E] += 0.01 * weight_EE.mean()
    return assign_equal(narrowed(np.rint(pull_EG * (1e6 / max(pull_EG.max(), 1.0))).astype(np.int64)))
