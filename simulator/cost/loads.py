"""Busiest port, pair, NIC and leaf of an exchange, layer by layer: the numbers that its time depends on.

On one node the pairs are read as they are; tests hold that, and the ports, to the loads on the topology's graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from semmoe.traffic.collective import Collective
from semmoe.traffic.over_ranks import most
from semmoe.traffic.ports import Ports
from semmoe.traffic.wiring import Wiring

Float = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Loads:
    """Rows, per layer. port: most that a rank sends or receives inside its node; mean_port: the mean over ranks;
    pair: most from one rank to one other inside a node; nic: most through a NIC bundle, one way; leaf: most through a
    leaf's uplinks, one way, over the NIC bundles under it."""

    port_L: Float
    mean_port_L: Float
    pair_L: Float
    nic_L: Float
    leaf_L: Float

    @property
    def skewed(self) -> bool:
        """Whether some layer's busiest port carries over 10 % more than the mean."""
        return bool((self.port_L > 1.1 * self.mean_port_L).any())


def loads_of(c: Collective, wiring: Wiring) -> Loads:
    """Loads of one exchange."""
    if wiring.nodes == 1 and c.rows_LGG is not None:
        sums, none_L = c.pair_sums, np.zeros(len(c.rows_LGG))
        port_L = np.maximum(most(sums.sent_LG), most(sums.received_LG))
        return Loads(port_L, sums.remote_L / wiring.ranks, sums.largest_L.astype(np.float64), none_L, none_L)
    return loads_of_ports(c.ports(wiring), wiring)


def loads_of_ports(ports: Ports, wiring: Wiring) -> Loads:
    """The same from rows per link."""
    port, mean, pair = near_maxima(ports.near_LGI)
    nic_L = np.maximum(ports.out_LN.max(axis=1), ports.in_LN.max(axis=1)).astype(np.float64)
    leaf_L = (np.maximum(ports.up_LF, ports.down_LF) / np.maximum(wiring.nics_F, 1)).max(axis=1)
    return Loads(port, mean, pair, nic_L, leaf_L)


@numba.njit(cache=True)
def near_maxima(near_LGI):  # type: ignore[no-untyped-def]
    """(port_L, mean_port_L, pair_L) in rows, from rows inside nodes; see Loads and Ports."""
    layers, ranks, inner = near_LGI.shape
    port, mean, pair = np.zeros(layers), np.zeros(layers), np.zeros(layers)
    inward = np.zeros(ranks, dtype=near_LGI.dtype)
    for layer in range(layers):
        inward[:] = 0
        most, largest, total = 0, 0, 0
        for s in range(ranks):
            out, first = 0, s // inner * inner
            for place in range(min(inner, ranks - first)):
                rows = near_LGI[layer, s, place]
                if first + place == s or rows == 0:
                    continue
                out += rows
                inward[first + place] += rows
                largest = max(largest, rows)
            most, total = max(most, out), total + out
        for d in range(ranks):
            most = max(most, inward[d])
        port[layer], pair[layer], mean[layer] = most, largest, total / ranks
    return port, mean, pair
