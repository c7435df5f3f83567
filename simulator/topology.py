"""Interconnect of a ClusterSpec as a graph, and the load that a pair matrix puts on each of its links.

Nodes: ("rank", g), ("switch", node), ("nic", n, "out" or "in"), ("leaf", f), ("spine",). Every edge is one direction of a
link and carries its `tier` ("port": rank to switch or back; "mesh": rank to rank; "nic": rank to leaf switch and back;
"spine": leaf to spine and back) and its capacity in GB/s. A row from rank s to rank d loads every edge of its path; a path
inside a node never leaves it. Which rank hangs where: semmoe/traffic/wiring.py; tests hold its fast counts to this graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec
from semmoe.traffic.wiring import Wiring

TIERS = ("port", "mesh", "nic", "spine")


@dataclass(frozen=True, eq=False)
class Topology:
    """The first `ranks` ranks of a cluster, filled node by node."""

    cluster: ClusterSpec
    wiring: Wiring

    @classmethod
    def of(cls, cluster: ClusterSpec, ranks: int) -> Topology:
        """Topology of an expert-parallel group over the first `ranks` ranks."""
        if not 1 <= ranks <= cluster.ranks:
            raise UserError(f"ep_size={ranks} on cluster {cluster.name}, which has {cluster.ranks} ranks")
        return cls(cluster, Wiring.of(cluster, ranks))

    @property
    def nodes(self) -> int:
        return self.wiring.nodes

    @property
    def same_node_GG(self) -> NDArray[np.bool_]:
        return self.wiring.node_G[:, None] == self.wiring.node_G[None, :]

    @cached_property
    def graph(self) -> nx.DiGraph:
        return build_graph(self.cluster, self.wiring.ranks)

    @cached_property
    def load_tier(self) -> dict[str, NDArray[np.float64]]:
        """By tier the incidence [G * G, links]: 1 where the pair (s, d) at row s * G + d crosses the link."""
        return _incidence(self.graph, self.wiring.ranks)

    def loads(self, tier: str, bytes_LGG: NDArray[np.floating]) -> NDArray[np.float64]:
        """Bytes on every link of a tier, [L, links], for bytes per pair. The diagonal (self-copies) loads nothing."""
        return bytes_LGG.reshape(len(bytes_LGG), -1) @ self.load_tier[tier]


def build_graph(cluster: ClusterSpec, ranks: int) -> nx.DiGraph:
    """Directed graph of the cluster's links with `tier` and `gbps` on every edge."""
    graph = nx.DiGraph()
    wiring = Wiring.of(cluster, ranks)
    for g in range(ranks):
        graph.add_node(("rank", g), node=int(wiring.node_G[g]))
    for node in range(wiring.nodes):
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
    if wiring.nodes > 1:
        _add_fabric(graph, cluster, wiring)
    return graph


def _add_fabric(graph: nx.DiGraph, cluster: ClusterSpec, wiring: Wiring) -> None:
    gbps = cluster.nic_bundle_gbps
    for g, nic in enumerate(wiring.nic_G.tolist()):
        graph.add_edge(("rank", g), ("nic", nic, "out"), tier="nic", gbps=gbps)
        graph.add_edge(("nic", nic, "in"), ("rank", g), tier="nic", gbps=gbps)
    for nic, leaf in enumerate(wiring.leaf_N.tolist()):
        graph.add_edge(("nic", nic, "out"), ("leaf", leaf), tier="nic", gbps=gbps)
        graph.add_edge(("leaf", leaf), ("nic", nic, "in"), tier="nic", gbps=gbps)
    if len(wiring.nics_F) > 1:
        for leaf, nics in enumerate(wiring.nics_F.tolist()):
            if nics:
                _both_ways(graph, ("leaf", leaf), ("spine",), "spine", nics * gbps / cluster.oversubscription)


def _both_ways(graph: nx.DiGraph, a: tuple[object, ...], b: tuple[object, ...], tier: str, gbps: float) -> None:
    graph.add_edge(a, b, tier=tier, gbps=gbps)
    graph.add_edge(b, a, tier=tier, gbps=gbps)


def paths_from(graph: nx.DiGraph, source: Any) -> dict[Any, list[Any]]:
    """A shortest path to every node that can be reached without passing through a rank: no rank relays unasked."""
    paths, frontier = {source: [source]}, [source]
    for node in frontier:  # grows while it is read: breadth first
        if node == source or node[0] != "rank":
            for after in graph.successors(node):
                if after not in paths:
                    paths[after] = [*paths[node], after]
                    frontier.append(after)
    return paths


def _incidence(graph: nx.DiGraph, ranks: int) -> dict[str, NDArray[np.float64]]:
    columns: dict[str, dict[tuple[object, object], int]] = {tier: {} for tier in TIERS}
    for a, b, tier in graph.edges(data="tier"):
        columns[tier][a, b] = len(columns[tier])
    load = {tier: np.zeros((ranks * ranks, len(columns[tier]))) for tier in TIERS}
    for s in range(ranks):
        paths = paths_from(graph, ("rank", s))
        for d in range(ranks):
            if s != d:
                for edge in pairwise(paths["rank", d]):
                    tier = graph.edges[edge]["tier"]
                    load[tier][s * ranks + d, columns[tier][edge]] = 1.0
    return load
