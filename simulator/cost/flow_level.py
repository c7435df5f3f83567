"""FlowCost: collectives in flow-level fidelity, behind the same calls as CollectiveCost.

    time = bottleneck time * (end of the last flow / what the busiest link alone needs)

The measured curve stays the measure of an exchange without congestion; how much longer the exchange takes because its
transfers hold each other up is what simulator/flows.py says. The factor is 1 where nothing congests. Worked example, one
hot receiver of four: its port needs 300 us; a sender whose other transfers waited for the hot one needs 360: factor 1.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from semmoe.traffic import Collective, Traffic

from ..flows import busiest_link_us, exchange_us
from .collectives import TOWARDS_HOME, CollectiveCost

Float = NDArray[np.float64]


class FlowCost(CollectiveCost):
    """CollectiveCost with the congestion of every layer's exchange; marks "flow_level"."""

    def _pairs_us(self, c: Collective, traffic: Traffic, copies_LGN: NDArray[np.integer] | None) -> Float:
        time = super()._pairs_us(c, traffic, copies_LGN)
        self.marks.add("flow_level")
        return time * np.array([self.congestion(rows_GG) for rows_GG in self._sent_LGG(c, traffic, copies_LGN)])

    def congestion(self, bytes_GG: NDArray[np.number]) -> float:
        """Time of an exchange over that of its busiest link alone, at least 1."""
        sent = np.asarray(bytes_GG, dtype=np.float64)
        alone = busiest_link_us(self.topology.graph, sent)
        return max(float(exchange_us(self.topology.graph, sent).max()) / alone, 1.0) if alone else 1.0

    def _sent_LGG(self, c: Collective, traffic: Traffic, copies_LGN: NDArray[np.integer] | None) -> Float:
        """Rows from rank to rank as they are put on links: direct, or by way of the same place on another node."""
        assert c.rows_LGG is not None
        hierarchical = self.topology.nodes > 1 and not self.sends_direct(c)
        if not hierarchical:
            return c.rows_LGG.astype(np.float64)
        homeward, inner = c.op in TOWARDS_HOME, self.inner
        rows = (c.rows_LGG.swapaxes(1, 2) if homeward else c.rows_LGG).astype(np.float64)
        layers, ranks, _ = rows.shape
        by_node = rows.reshape(layers, ranks, -1, inner)
        copies = self.node_copies(c, traffic, copies_LGN)
        sent = np.zeros_like(rows)
        for s in range(ranks):
            for node in range(self.topology.nodes):
                relay = node * inner + s % inner
                sent[:, relay, node * inner : (node + 1) * inner] += by_node[:, s, node]
                if node != s // inner:
                    sent[:, s, relay] += by_node[:, s, node].sum(axis=1) if copies is None else copies[:, s, node]
        return sent.swapaxes(1, 2) if homeward else sent
