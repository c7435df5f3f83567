"""FlowCost: collectives in flow-level fidelity, behind the same calls as CollectiveCost.

    time = bottleneck time * (end of the last flow / what the busiest link alone needs)

The measured curve stays the measure of an exchange without congestion; how much longer the exchange takes because its
transfers hold each other up is what simulator/flows.py says. The factor is 1 where nothing congests. Worked example, one
hot receiver of four: its port needs 300 us; a sender whose other transfers waited for the hot one needs 360: factor 1.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.traffic import Traffic
from semmoe.traffic.collective import TOWARDS_HOME, Collective
from semmoe.traffic.ports import relay

from ..flows import busiest_link_us, exchange_us
from .collectives import CollectiveCost

Float = NDArray[np.float64]


class FlowCost(CollectiveCost):
    """CollectiveCost with the congestion of every layer's exchange; marks "flow_level"."""

    needs_pairs = True

    def _pairs_us(self, c: Collective, traffic: Traffic) -> Float:
        if c.rows_LGG is None:
            raise UserError(f"cost.fidelity=flow needs the rows of every pair; over {self.ranks} ranks use bottleneck")
        time = super()._pairs_us(c, traffic)
        self.marks.add("flow_level")
        return time * np.array([self.congestion(rows_GG) for rows_GG in self.hops_LGG(c)])

    def congestion(self, bytes_GG: NDArray[np.number]) -> float:
        """Time of an exchange over that of its busiest link alone, at least 1."""
        sent = np.asarray(bytes_GG, dtype=np.float64)
        alone = busiest_link_us(self.topology.graph, sent)
        return max(float(exchange_us(self.topology.graph, sent).max()) / alone, 1.0) if alone else 1.0

    def hops_LGG(self, c: Collective) -> Float:
        """Rows from rank to rank as they are put on links: straight, or by way of the relay on another node."""
        assert c.rows_LGG is not None
        if c.copies_LGN is None:
            return c.rows_LGG.astype(np.float64)
        homeward, inner, ranks = c.op in TOWARDS_HOME, self.inner, self.ranks
        rows_LGG = (c.rows_LGG.swapaxes(1, 2) if homeward else c.rows_LGG).astype(np.float64)
        hops_LGG = np.zeros_like(rows_LGG)
        for s in range(ranks):
            for node in range(self.topology.nodes):
                via, members = s, slice(node * inner, (node + 1) * inner)
                if node != s // inner:
                    via = relay(s, node, inner, ranks)
                    hops_LGG[:, s, via] += c.copies_LGN[:, s, node]
                hops_LGG[:, via, members] += rows_LGG[:, s, members]
        return hops_LGG.swapaxes(1, 2) if homeward else hops_LGG
