"""MoETuner: two integer programs, balance first, then the tail of the traffic between layers.

1. Per layer, experts to G clusters: minimise sum_c |load_c - mean|. The source lets cluster sizes differ; engines need
   equally many slots a rank, so here they are equal. HiGHS proves or improves what exchanges found.
2. Clusters to ranks: minimise the sum over consecutive layers of max over g1 != g2 of flow(c1, c2) / bandwidth(g1, g2),
   where a flow counts tokens routed to cluster c1 and, in the next layer, to c2. With one bandwidth only the relative
   order of two layers matters, so boundary by boundary is optimal, each an exact bottleneck assignment (ties: least
   remote flow). Over several nodes, exchanges, then sweeps that re-solve one layer between both neighbours with HiGHS.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ..errors import UserError
from .base import Placement, PlacementProblem
from .exflow import group_flow
from .groups import most_a_rank, nodes_of, placed, with_phantoms
from .layer_tail import least_tail
from .load_balanced import SPREAD, balance, cost
from .search_clock import search_s


class MoETuner:
    """Both integer programs of MoETuner: clusters of equal load, then clusters to ranks for the least tail traffic.

    tolerance: imbalance (as a share of the layer's assignments) from which on a cluster program counts as solved.
    kicks: shuffles of the exchanges. notes: "imbalance_share" and "imbalance_gap" (value less proved bound, worst
    layer), "tail" (sum over boundaries, in assignments over the fastest link) and "tail_gap" (relative, 0 where proved).
    """

    def __init__(self, tolerance: float = 5e-3, kicks: int = 32) -> None:
        if not tolerance >= 0 or kicks < 0:
            raise UserError(f"placement.tolerance={tolerance} and placement.kicks={kicks} must be at least 0")
        self.tolerance, self.kicks = tolerance, kicks

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks = problem.profile, problem.ep_size
        layers, until = profile.num_layers, search_s() + problem.time_limit_s / 2
        wide = most_a_rank(profile.num_experts, ranks) * ranks
        clusters, shares, gaps = [], [], []
        for layer in range(layers):
            load_E = np.zeros(wide)
            load_E[: profile.num_experts] = profile.load_LE[layer]
            left_s = (until - search_s()) / (layers - layer)
            cluster_E, value, bound = balanced_clusters(load_E, ranks, self.tolerance, self.kicks, left_s, problem.seed)
            clusters.append(cluster_E)
            shares.append(value / max(load_E.sum(), 1.0))
            gaps.append((value - bound) / max(load_E.sum(), 1.0))
        if max(gaps) > self.tolerance:
            warnings.warn(f"moetuner: time limit; clusters' imbalance is {max(gaps):.2%} above its bound", stacklevel=2)
        flows = [
            group_flow(with_phantoms(profile.transitions_EE(i), wide), clusters[i - 1], clusters[i], ranks)
            for i in range(1, layers)
        ]
        slowness_GG = relative_slowness(problem)
        rank_LC, tail, bound = least_tail(flows, slowness_GG, search_s() + problem.time_limit_s / 2)
        notes = {
            "imbalance_share": float(np.mean(shares)),
            "imbalance_gap": float(max(gaps)),
            "tail": tail,
            "tail_gap": (tail - bound) / tail if tail > 0 else 0.0,
        }
        rank_LE = np.stack([rank_C[cluster_E] for rank_C, cluster_E in zip(rank_LC, clusters, strict=True)])
        return placed(rank_LE, problem, notes)


def relative_slowness(problem: PlacementProblem) -> NDArray[np.float64]:
    """slowness_GG: 1 inside a node, link / NIC bandwidth between nodes, 0 on the diagonal."""
    nodes, cluster = nodes_of(problem), problem.cluster
    node_G = np.arange(problem.ep_size) // (problem.ep_size // nodes)
    across = cluster.link_gbps / cluster.nic_gbps if nodes > 1 else 1.0
    slowness = np.where(node_G[:, None] == node_G[None, :], 1.0, across)
    np.fill_diagonal(slowness, 0.0)
    return slowness


def balanced_clusters(
    load_E: NDArray[np.float64], clusters: int, tolerance: float, kicks: int, time_limit_s: float, seed: int = 0
) -> tuple[NDArray[np.int64], float, float]:
    """(cluster_E, value, proved lower bound) of sum_c |load_c - mean| with E / clusters experts each."""
    found_E = balance(load_E, np.full(len(load_E), -1), clusters, SPREAD, kicks, seed)
    value = cost(load_E, found_E, clusters, SPREAD)
    size = len(load_E) // clusters
    lightest = float(np.sort(load_E)[: size - 1].sum())  # the hottest expert shares its rank with size - 1 others
    least = 2.0 * max(0.0, float(load_E.max()) + lightest - load_E.sum() / clusters)
    if value - least <= tolerance * load_E.sum() or time_limit_s <= 0:
        return found_E, value, min(least, value)
    solved = _cluster_program(load_E, clusters, value, time_limit_s)
    bound = min(max(solved[1], least), value)
    if solved[0] is not None:
        other = cost(load_E, solved[0], clusters, SPREAD)
        if other < value:
            found_E, value = solved[0], other
    return found_E, value, min(bound, value)


def _cluster_program(
    load_E: NDArray[np.float64], clusters: int, cutoff: float, time_limit_s: float
) -> tuple[NDArray[np.int64] | None, float]:
    """HiGHS on x[e, c] binary, d[c] >= |load_c - mean|; the heaviest expert sits in cluster 0 (labels are free)."""
    experts, unit = len(load_E), max(float(load_E.mean()), 1e-12)
    load_E, cutoff = load_E / unit, cutoff / unit  # HiGHS ends with solve errors where numbers are far from 1
    binaries = experts * clusters
    variable = np.arange(binaries).reshape(experts, clusters)
    ones = np.ones(binaries)
    once = coo_array(
        (ones, (np.repeat(np.arange(experts), clusters), np.arange(binaries))), (experts, binaries + clusters)
    )
    size = coo_array(
        (ones, (np.tile(np.arange(clusters), experts), np.arange(binaries))), (clusters, binaries + clusters)
    )
    cluster_rows = np.concatenate([np.tile(np.arange(clusters), experts), np.arange(clusters)])
    columns = np.concatenate([np.arange(binaries), binaries + np.arange(clusters)])
    mean = load_E.sum() / clusters
    above = coo_array(
        (np.concatenate([np.repeat(load_E, clusters), -np.ones(clusters)]), (cluster_rows, columns)),
        (clusters, binaries + clusters),
    )
    below = coo_array(
        (np.concatenate([np.repeat(load_E, clusters), np.ones(clusters)]), (cluster_rows, columns)),
        (clusters, binaries + clusters),
    )
    upper = np.concatenate([np.ones(binaries), np.full(clusters, cutoff)])
    lower = np.zeros(binaries + clusters)
    lower[variable[int(load_E.argmax()), 0]] = 1.0
    answer = milp(
        np.concatenate([np.zeros(binaries), np.ones(clusters)]),
        constraints=[
            LinearConstraint(once.tocsr(), 1, 1),
            LinearConstraint(size.tocsr(), experts // clusters, experts // clusters),
            LinearConstraint(above.tocsr(), -np.inf, mean),
            LinearConstraint(below.tocsr(), mean, np.inf),
        ],
        integrality=np.concatenate([np.ones(binaries), np.zeros(clusters)]),
        bounds=Bounds(lower, upper),
        options={"time_limit": max(time_limit_s, 0.05), "mip_rel_gap": 1e-6},
    )
    bound = float(answer.mip_dual_bound) if answer.mip_dual_bound is not None else 0.0
    bound *= unit
    if answer.x is None:
        return None, bound if answer.status != 2 else cutoff * unit
    return answer.x[:binaries].reshape(experts, clusters).argmax(axis=1).astype(np.int64), bound
