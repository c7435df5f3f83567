"""Interconnect of a ClusterSpec as a graph, and the load that a pair matrix puts on each of its links.

Nodes: ("rank", g), ("switch", node), ("nic", g), ("fabric",). Every edge is one direction of a link and carries its
`tier` ("port": rank to switch or back; "mesh": rank to rank; "nic": rank to the network between nodes) and its
capacity in GB/s. A row from rank s to rank d loads every edge of its path; a path inside a node never leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec

TIERS = ("port", "mesh", "nic")


@dataclass(frozen=True, eq=False)
class Topology:
    """The first `ranks` ranks of a cluster.

    load_tier[tier]: incidence [G * G, links of the tier]: 1 where the pair (s, d) at row s * G + d crosses the link.
    node_of_G: node of every rank. ranks_per_node: ranks of this group on the fullest node.
    """

    graph: nx.DiGraph
    ranks: int
    node_of_G: NDArray[np.int64]
    load_tier: dict[str, NDArray[np.float64]]

    @classmethod
    def of(cls, cluster: ClusterSpec, ranks: int) -> Topology:
        """Topology of an expert-parallel group over the first `ranks` ranks, filled node by node."""
        if not 1 <= ranks <= cluster.ranks:
            raise UserError(f"ep_size={ranks} on cluster {cluster.name}, which has {cluster.ranks} ranks")
        graph = build_graph(cluster, ranks)
        return cls(graph, ranks, np.arange(ranks) // cluster.ranks_per_node, _incidence(graph, ranks))

    @property
    def nodes(self) -> int:
        return int(self.node_of_G[-1]) + 1

    @property
    def ranks_per_node(self) -> int:
        return int(np.bincount(self.node_of_G).max())

    @property
    def same_node_GG(self) -> NDArray[np.bool_]:
        return self.node_of_G[:, None] == self.node_of_G[None, :]

    def loads(self, tier: str, bytes_LGG: NDArray[np.floating]) -> NDArray[np.float64]:
        """Bytes on every link of a tier, [L, links], for bytes per pair. The diagonal (self-copies) loads nothing."""
        return bytes_LGG.reshape(len(bytes_LGG), -1) @ self.load_tier[tier]


def build_graph(cluster: ClusterSpec, ranks: int) -> nx.DiGraph:
    """Directed graph of the cluster's links with `tier` and `gbps` on every edge."""
    graph = nx.DiGraph()
    for g in range(ranks):
        graph.add_node(("rank", g), node=g // cluster.ranks_per_node)
    for node in range(-(-ranks // cluster.ranks_per_node)):
        members = range(node * cluster.ranks_per_node, min((node + 1) * cluster.ranks_per_node, ranks))
        if cluster.topology == "mesh":
            link_gbps = cluster.mesh_link_gbps or cluster.link_gbps / max(cluster.ranks_per_node - 1, 1)
            for s in members:
                for d in members:
                    if s != d:
                        graph.add_edge(("rank", s), ("rank", d), tier="mesh", gbps=link_gbps)
        else:
            for g in members:
                _both_ways(graph, ("rank", g), ("switch", node), "port", cluster.link_gbps)
    if ranks > cluster.ranks_per_node:
        for g in range(ranks):
            _both_ways(graph, ("rank", g), ("nic", g), "nic", cluster.nic_gbps)
            _both_ways(graph, ("nic", g), ("fabric",), "nic", cluster.nic_gbps)
    return graph


def _both_ways(graph: nx.DiGraph, a: tuple[object, ...], b: tuple[object, ...], tier: str, gbps: float) -> None:
    graph.add_edge(a, b, tier=tier, gbps=gbps)
    graph.add_edge(b, a, tier=tier, gbps=gbps)


def _incidence(graph: nx.DiGraph, ranks: int) -> dict[str, NDArray[np.float64]]:
    columns: dict[str, dict[tuple[object, object], int]] = {tier: {} for tier in TIERS}
    for a, b, tier in graph.edges(data="tier"):
        columns[tier][a, b] = len(columns[tier])
    load = {tier: np.zeros((ranks * ranks, len(columns[tier]))) for tier in TIERS}
    for s in range(ranks):
        paths = nx.single_source_shortest_path(graph, ("rank", s))
        for d in range(ranks):
            if s != d:
                path = paths["rank", d]
                for edge in pairwise(path):
                    tier = graph.edges[edge]["tier"]
                    load[tier][s * ranks + d, columns[tier][edge]] = 1.0
    return load
