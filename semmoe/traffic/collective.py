"""Collective: one exchange between ranks, layer by layer, and the sums of its rows that bytes and times are made of."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .ports import Ports, relayed_ports, straight_ports
from .route_counts import pair_sums
from .wiring import Int, Wiring

TOWARDS_HOME = ("combine", "srs", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class PairSums:
    """Of rows [L, s, d]: sent_LG and received_LG between different ranks, local_LG on the diagonal, and the most from one
    rank to one other. remote_L: all rows that leave their rank."""

    sent_LG: Int
    received_LG: Int
    local_LG: Int
    largest_L: Int
    remote_L: Int

    @classmethod
    def of(cls, rows_LGG: Int) -> PairSums:
        return cls(*pair_sums(np.ascontiguousarray(rows_LGG)))

    def cut(self, layers: slice) -> PairSums:
        """Of some layers."""
        return PairSums(*(getattr(self, part.name)[layers] for part in fields(self)))

    def reversed(self) -> PairSums:
        """Of the same exchange the other way."""
        return replace(self, sent_LG=self.received_LG, received_LG=self.sent_LG)


@dataclass(frozen=True, eq=False)
class Collective:
    """One exchange: rows_LGG[l, s, d] rows of row_bytes from rank s to rank d (diagonal: self-copies, never bytes).

    An all-reduce has no pairs: `buffer_rows_L` rows stand on every rank, of which 2 (G - 1) / G cross its links.
    copies_LGN: distinct rows that rank s exchanges with each node (of those that it has at home), which then cross between
    nodes once; None: rows go straight from rank to rank. counted: ports that stand for the pairs (many ranks).
    """

    op: str
    row_bytes: float
    rows_LGG: Int | None = None
    buffer_rows_L: Int | None = None
    copies_LGN: Int | None = None
    counted: Ports | None = None

    @cached_property
    def pair_sums(self) -> PairSums:
        assert self.rows_LGG is not None
        return PairSums.of(self.rows_LGG)

    def ports(self, wiring: Wiring) -> Ports:
        """Rows on every link; not of an all-reduce."""
        if self.counted is not None:
            return self.counted
        assert self.rows_LGG is not None
        homeward = self.op in TOWARDS_HOME
        rows = np.ascontiguousarray(self.rows_LGG.swapaxes(1, 2)) if homeward else self.rows_LGG
        copies = self.copies_LGN
        made = straight_ports(rows, wiring) if copies is None else relayed_ports(rows, copies, wiring)
        return made.reversed() if homeward else made

    def remote_rows_LGG(self) -> Int:
        assert self.rows_LGG is not None
        off = self.rows_LGG.copy()
        off[:, np.arange(off.shape[1]), np.arange(off.shape[1])] = 0
        return off

    def remote_bytes_L(self, ep_size: int) -> NDArray[np.float64]:
        """Payload bytes that leave their rank, summed over ranks."""
        if self.buffer_rows_L is not None:
            return np.asarray(2.0 * (ep_size - 1) * self.buffer_rows_L * self.row_bytes, dtype=np.float64)
        if self.counted is not None:
            return np.asarray((self.counted.node_rows_L + self.counted.nic_rows_L) * self.row_bytes, dtype=np.float64)
        return np.asarray(self.pair_sums.remote_L * self.row_bytes, dtype=np.float64)
