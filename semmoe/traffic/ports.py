"""Ports: the rows that one exchange puts on each link, layer by layer. What is counted and what is priced.

Rows go straight from rank to rank, or hierarchically: one copy to each node over the NICs of the sender's place, which the
rank of that place there passes on to the ranks that need it. Towards home (combine, SRS) the same links carry sums back.
Worked example, 2 nodes of 2 ranks: ten tokens of rank 0 that ranks 2 and 3 both serve are 20 rows between nodes when sent
straight; hierarchically 10 between nodes, to rank 2, and 10 more inside node 1, from rank 2 to rank 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from numpy.typing import NDArray

from .wiring import Int, Wiring


@dataclass(frozen=True, eq=False)
class Ports:
    """near_LGI[l, s, i]: rows from rank s to the rank at place i of its node (its own place: self-copies, on no link).
    out_LN, in_LN: rows through each NIC bundle, away from its node and into it. up_LF, down_LF: rows through the uplinks
    of each leaf switch."""

    near_LGI: Int
    out_LN: Int
    in_LN: Int
    up_LF: Int
    down_LF: Int

    @cached_property
    def node_rows_L(self) -> Int:
        """Rows on links inside nodes."""
        ranks, inner = self.near_LGI.shape[1:]
        own_L = self.near_LGI[:, np.arange(ranks), np.arange(ranks) % inner].sum(axis=1)
        return np.asarray(self.near_LGI.sum(axis=(1, 2)) - own_L)

    @property
    def nic_rows_L(self) -> Int:
        """Rows between nodes."""
        return np.asarray(self.out_LN.sum(axis=1))

    @property
    def spine_rows_L(self) -> Int:
        """Those of them that leave their leaf switch."""
        return np.asarray(self.up_LF.sum(axis=1))

    def reversed(self) -> Ports:
        """The same exchange the other way."""
        layers, ranks, inner = self.near_LGI.shape
        padded = np.zeros((layers, -(-ranks // inner) * inner, inner), dtype=self.near_LGI.dtype)
        padded[:, :ranks] = self.near_LGI
        swapped = padded.reshape(layers, -1, inner, inner).swapaxes(2, 3).reshape(layers, -1, inner)[:, :ranks]
        return Ports(np.ascontiguousarray(swapped), self.in_LN, self.out_LN, self.down_LF, self.up_LF)


def straight_ports(rows_LGG: NDArray[np.integer], wiring: Wiring) -> Ports:
    """Rows sent straight from rank to rank, rows_LGG[l, s, d]."""
    return Ports(*_straight(as_rows(rows_LGG), *wiring_arrays(wiring)))


def relayed_ports(rows_LGG: NDArray[np.integer], copies_LGN: NDArray[np.integer], wiring: Wiring) -> Ports:
    """Hierarchical: rows_LGG[l, s, d] distinct rows of s that rank d needs, copies_LGN[l, s, n] those that any rank of
    node n needs (its own node's entry does not count)."""
    return Ports(*_relayed(as_rows(rows_LGG), as_rows(copies_LGN), *wiring_arrays(wiring)))


def gathered_ports(homes_LG: NDArray[np.integer], wiring: Wiring) -> Ports:
    """Hierarchical, every row to every rank: homes_LG[l, s] rows of rank s."""
    return Ports(*_gathered(as_rows(homes_LG), *wiring_arrays(wiring)))


def as_rows(rows: NDArray[np.integer]) -> Int:
    """Whole rows as int64; expected rows (simulator) stay fractions, which add up over few tokens too."""
    return np.ascontiguousarray(rows, dtype=np.float64 if rows.dtype.kind == "f" else np.int64)


def wiring_arrays(wiring: Wiring) -> tuple[int, Int, Int, int]:
    return wiring.ranks_per_node, wiring.nic_G, wiring.leaf_N, len(wiring.nics_F)


@numba.njit(cache=True)
def relay(source, node, inner, ranks):  # type: ignore[no-untyped-def]
    """The rank of the source's place on another node (of a smaller last node: its place modulo the node's ranks)."""
    to = node * inner + source % inner
    return to if to < ranks else node * inner + (source % inner) % (ranks - node * inner)


@numba.njit(cache=True)
def no_rows(layers, ranks, inner, nic_G, leaves, like):  # type: ignore[no-untyped-def]
    """Zeros of the arrays of Ports, of the type of `like`."""
    near = np.zeros((layers, ranks, inner), dtype=like.dtype)
    nics = nic_G.max() + 1
    out, into = np.zeros((layers, nics), dtype=like.dtype), np.zeros((layers, nics), dtype=like.dtype)
    up, down = np.zeros((layers, leaves), dtype=like.dtype), np.zeros((layers, leaves), dtype=like.dtype)
    return near, out, into, up, down


@numba.njit(cache=True)
def cross(layer, s, d, rows, nic_G, leaf_N, out, into, up, down):  # type: ignore[no-untyped-def]
    """Put rows from s to d on the links between their nodes."""
    out[layer, nic_G[s]] += rows
    into[layer, nic_G[d]] += rows
    above, below = leaf_N[nic_G[s]], leaf_N[nic_G[d]]
    if above != below:
        up[layer, above] += rows
        down[layer, below] += rows


@numba.njit(cache=True)
def _straight(rows_LGG, inner, nic_G, leaf_N, leaves):  # type: ignore[no-untyped-def]
    layers, ranks, _ = rows_LGG.shape
    near, out, into, up, down = no_rows(layers, ranks, inner, nic_G, leaves, rows_LGG)
    for layer in range(layers):
        for s in range(ranks):
            for d in range(ranks):
                rows = rows_LGG[layer, s, d]
                if s // inner == d // inner:
                    near[layer, s, d % inner] += rows
                elif rows:
                    cross(layer, s, d, rows, nic_G, leaf_N, out, into, up, down)
    return near, out, into, up, down


@numba.njit(cache=True)
def _relayed(rows_LGG, copies_LGN, inner, nic_G, leaf_N, leaves):  # type: ignore[no-untyped-def]
    layers, ranks, _ = rows_LGG.shape
    near, out, into, up, down = no_rows(layers, ranks, inner, nic_G, leaves, rows_LGG)
    for layer in range(layers):
        for s in range(ranks):
            for d in range(ranks):
                via = s if s // inner == d // inner else relay(s, d // inner, inner, ranks)
                near[layer, via, d % inner] += rows_LGG[layer, s, d]
            for node in range(copies_LGN.shape[2]):
                if node != s // inner:
                    to = relay(s, node, inner, ranks)
                    cross(layer, s, to, copies_LGN[layer, s, node], nic_G, leaf_N, out, into, up, down)
    return near, out, into, up, down


@numba.njit(cache=True)
def _gathered(homes_LG, inner, nic_G, leaf_N, leaves):  # type: ignore[no-untyped-def]
    layers, ranks = homes_LG.shape
    near, out, into, up, down = no_rows(layers, ranks, inner, nic_G, leaves, homes_LG)
    nodes = (ranks + inner - 1) // inner
    for layer in range(layers):
        for s in range(ranks):
            for node in range(nodes):
                to = s if node == s // inner else relay(s, node, inner, ranks)
                if to != s:
                    cross(layer, s, to, homes_LG[layer, s], nic_G, leaf_N, out, into, up, down)
                near[layer, to, to % inner] += homes_LG[layer, s]  # what a rank holds, it passes on to its node
        for g in range(ranks):
            held = near[layer, g, g % inner]
            for place in range(min(inner, ranks - g // inner * inner)):
                near[layer, g, place] = held
    return near, out, into, up, down
