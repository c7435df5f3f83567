"""Busiest port, pair and NIC of an exchange, layer by layer: the numbers that its time depends on.

`maxima` is the fast path of `Topology.loads` (tests hold one to the other).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Loads:
    """Rows, per layer. port: most that a rank sends or receives inside its node; mean_port: the mean over ranks;
    pair: most from one rank to one other inside a node; nic: most that a rank sends or receives between nodes."""

    port_L: Float
    mean_port_L: Float
    pair_L: Float
    nic_L: Float

    @property
    def skewed(self) -> bool:
        """Whether some layer's busiest port carries over 10 % more than the mean."""
        return bool((self.port_L > 1.1 * self.mean_port_L).any())


def loads_of(rows_LGG: NDArray[np.integer], ranks_per_node: int) -> Loads:
    """Loads of rows_LGG[l, s, d] sent straight from s to d; ranks are filled node by node."""
    return Loads(*maxima(rows_LGG, ranks_per_node))


def hierarchical_loads(
    rows_LGG: NDArray[np.integer], copies_LGN: NDArray[np.integer] | None, ranks_per_node: int
) -> Loads:
    """Loads when one copy goes to each node: over the NIC to the rank of the same place there, then on inside the node.

    copies_LGN[l, s, n]: rows that rank s sends to node n (its own node's entry does not count); None: as many as it
    has for the node's ranks together, an upper bound.
    """
    layers, ranks, _ = rows_LGG.shape
    nodes = -(-ranks // ranks_per_node)
    if ranks % ranks_per_node:
        raise ValueError(f"{ranks} ranks do not fill nodes of {ranks_per_node}")
    by_node = rows_LGG.reshape(layers, nodes, ranks_per_node, nodes, ranks_per_node)
    copies = by_node.sum(axis=4).reshape(layers, ranks, nodes) if copies_LGN is None else copies_LGN
    node_G = np.arange(ranks) // ranks_per_node
    away_GN = node_G[:, None] != np.arange(nodes)
    out_LG = (copies * away_GN).sum(axis=2)
    sent = (copies * away_GN).reshape(layers, nodes, ranks_per_node, nodes)
    in_LG = sent.sum(axis=1).swapaxes(1, 2).reshape(layers, ranks)  # node n, place j gets from place j of every node
    inside = np.zeros_like(rows_LGG)
    for node in range(nodes):
        block = slice(node * ranks_per_node, (node + 1) * ranks_per_node)
        inside[:, block, block] = by_node[:, :, :, node].sum(axis=1)  # forwarded by the rank of the sender's place
    port, mean, pair, _ = maxima(inside, ranks_per_node)
    return Loads(port, mean, pair, np.maximum(out_LG.max(axis=1), in_LG.max(axis=1)).astype(np.float64))


@numba.njit(cache=True)
def maxima(rows_LGG, ranks_per_node):  # type: ignore[no-untyped-def]
    """(port_L, mean_port_L, pair_L, nic_L) in rows; see Loads."""
    layers, ranks, _ = rows_LGG.shape
    port, mean = np.zeros(layers), np.zeros(layers)
    pair, nic = np.zeros(layers), np.zeros(layers)
    inward = np.zeros(ranks, dtype=np.int64)
    far_in = np.zeros(ranks, dtype=np.int64)
    for layer in range(layers):
        inward[:] = 0
        far_in[:] = 0
        most, far_most, largest, total = 0, 0, 0, 0
        for s in range(ranks):
            out, far_out = 0, 0
            for d in range(ranks):
                rows = rows_LGG[layer, s, d]
                if s == d or rows == 0:
                    continue
                if s // ranks_per_node == d // ranks_per_node:
                    out += rows
                    inward[d] += rows
                    largest = max(largest, rows)
                else:
                    far_out += rows
                    far_in[d] += rows
            most, far_most, total = max(most, out), max(far_most, far_out), total + out
        for d in range(ranks):
            most, far_most = max(most, inward[d]), max(far_most, far_in[d])
        port[layer], pair[layer], nic[layer], mean[layer] = most, largest, far_most, total / ranks
    return port, mean, pair, nic


@numba.njit(cache=True)
def node_copies(slots_TLk, homes_TL, num_slots, ep_size, ranks_per_node):  # type: ignore[no-untyped-def]
    """copies_LGN[l, s, n]: tokens at home on rank s with an assignment on a rank of node n, which is sent once."""
    tokens, layers, k = slots_TLk.shape
    nodes = (ep_size + ranks_per_node - 1) // ranks_per_node
    slots_per_node = (num_slots // ep_size) * ranks_per_node
    copies = np.zeros((layers, ep_size, nodes), dtype=np.int64)
    for t in range(tokens):
        for layer in range(layers):
            seen = 0
            for j in range(k):
                node = slots_TLk[t, layer, j] // slots_per_node
                if not (seen >> node) & 1:
                    seen |= 1 << node
                    copies[layer, homes_TL[t, layer], node] += 1
    return copies
