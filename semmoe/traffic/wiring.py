"""Wiring of an expert-parallel group: which NIC and which leaf switch the rows of a rank go through between nodes.

Ranks are filled node by node. Between nodes a rank sends through one bundle of NICs: its own, or one that it shares with
its neighbours where a node has fewer NICs than ranks. Bundles hang on leaf switches, by the cluster's `fabric`:

    flat   one switch without a bottleneck for all
    rail   bundles of the same place of `nodes_per_leaf` nodes share a leaf (rail-optimised); leaves meet in the spine
    rack   all bundles of `nodes_per_leaf` nodes share a leaf (top of rack); leaves meet in the spine

Worked example, 2 nodes of 4 ranks, rail: ranks 1 and 5 hang on leaf 1, so 1 -> 5 stays under it and 1 -> 6 takes the spine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..specs import ClusterSpec

Int = NDArray[np.int64]
PAIRS_UP_TO = 64  # ranks; beyond, over several nodes, sums by port stand for pairs (wide.py)
NEEDED_PAIRS_UP_TO = 128  # ranks; pairs are counted so far for what cannot do without (their cost grows with ranks^2)


@dataclass(frozen=True, eq=False)
class Wiring:
    """ranks_per_node: of the fullest node. nic_G: NIC bundle of every rank; leaf_N: leaf switch of every bundle.
    needs_pairs: see with_pairs."""

    ranks: int
    ranks_per_node: int
    nic_G: Int
    leaf_N: Int
    needs_pairs: bool = False

    @classmethod
    def of(cls, cluster: ClusterSpec, ranks: int) -> Wiring:
        """The first `ranks` ranks of a cluster."""
        inner = cluster.ranks_per_node
        node_G, place_G = np.divmod(np.arange(ranks), inner)
        bundles = min(cluster.nics_per_node or inner, inner)  # a node
        nic_G = node_G * bundles + place_G // (inner // bundles)
        node_N, place_N = np.divmod(np.arange(int(nic_G.max()) + 1), bundles)
        if cluster.fabric == "flat":
            leaf_N = np.zeros_like(node_N)
        else:
            group_N = node_N // (cluster.nodes_per_leaf or cluster.nodes)
            leaf_N = group_N * bundles + place_N if cluster.fabric == "rail" else group_N
        return cls(ranks, min(inner, ranks), nic_G, leaf_N)

    @classmethod
    def plain(cls, ranks: int, ranks_per_node: int | None = None) -> Wiring:
        """A NIC a rank, one leaf; by default one node."""
        return cls(ranks, ranks_per_node or ranks, np.arange(ranks), np.zeros(ranks, dtype=np.int64))

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def wide(self) -> bool:
        """Whether Traffic holds sums by port instead of pairs."""
        return self.nodes > 1 and self.ranks > (NEEDED_PAIRS_UP_TO if self.needs_pairs else PAIRS_UP_TO)

    def with_pairs(self) -> Wiring:
        """The same for a reader of pair matrices, which get them over more ranks."""
        return replace(self, needs_pairs=True)

    @property
    def node_G(self) -> Int:
        return np.arange(self.ranks) // self.ranks_per_node

    @property
    def leaf_groups(self) -> int:
        """Groups of nodes that can reach each other through the spine only."""
        return len(np.unique(self.leaf_N[self.nic_G[:: self.ranks_per_node]]))

    @property
    def nics_F(self) -> Int:
        """Bundles under every leaf."""
        return np.bincount(self.leaf_N)
