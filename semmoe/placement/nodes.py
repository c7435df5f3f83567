"""Ranks to nodes: which ranks share a node, given what they send each other.

Experts and homes fix the traffic between any two ranks; a rank's number only says on which node it sits. Maximise the
traffic that stays on a node, nodes of equal size (partition.polish). Locality and load of the ranks stay as they are,
copies over the NICs go down.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .partition import kept, polish

KICKS = 200


def traffic_between(local_EG: NDArray[np.integer], spread_EG: NDArray[np.floating]) -> NDArray[np.float64]:
    """[home, serving rank] assignments: local_EG from tokens at home g, spread_EG who serves which share (replicas.py)."""
    return np.asarray(local_EG.T.astype(np.float64) @ spread_EG)


def order_by_node(traffic_GG: NDArray[np.floating], nodes: int) -> NDArray[np.int64]:
    """order_G: rank order_G[i] becomes rank i; nodes are blocks of G / nodes ranks. Unchanged where nothing is gained.

    Worked example: 4 ranks, 2 nodes, only ranks 0 and 2 talk: the order is [0, 2, 1, 3].
    """
    ranks = len(traffic_GG)
    between_GG = traffic_GG + traffic_GG.T
    np.fill_diagonal(between_GG, 0.0)
    before_G = np.arange(ranks) // (ranks // nodes)
    node_G = before_G.copy()
    polish(between_GG, node_G, nodes, ranks // nodes, KICKS, 0)
    if kept(between_GG, node_G) <= kept(between_GG, before_G):
        return np.arange(ranks)
    return np.argsort(node_G, kind="stable")
