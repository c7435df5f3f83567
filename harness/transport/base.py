"""Transport: the operations that move rows between ranks. Ranks call every one of them together, in the same order.

What they do is said in rows.py, over which the transports are built; choose.py makes them by name.

Letters: G ranks, N rows, M metadata entries, C elements of a row, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..counting import Counter
from .plan import ShufflePlan


@dataclass(frozen=True, eq=False)
class Received:
    """Rows that arrived, in order of the sending rank: rows_G[s] of them and meta_G[s] metadata entries from rank s.

    places: low_latency only, the place in the fixed slots of each row, to which its answer must go back.
    """

    rows_NC: Tensor
    meta_M2: Tensor
    rows_G: list[int]
    meta_G: list[int]
    places_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PeerBuffer:
    """One buffer of the same shape on every rank, readable by all.

    local: this rank's tensor; peers_G: everyone's, in rank order; table_G: their addresses (int64, for kernels).
    """

    local: Tensor
    peers_G: list[Tensor]
    table_G: Tensor


class Transport(Protocol):
    """What the layer needs. `alloc` and `barrier` exist where peers' memory can be addressed."""

    name: str
    rank: int
    ranks: int
    kernel_path: str
    counter: Counter

    def srs(self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None = None, op: str = "srs") -> Tensor: ...

    def srs_norm(
        self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None, norm_H: Tensor, op: str = "srs"
    ) -> tuple[Tensor, Tensor]: ...

    def sag(self, rows_NC: Tensor, plan: ShufflePlan, op: str = "sag") -> Tensor: ...

    def sag_with_ids(
        self, rows_NC: Tensor, ids_Nk: Tensor, plan: ShufflePlan, op: str = "sag"
    ) -> tuple[Tensor, Tensor]: ...

    def dispatch(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_M2: Tensor, send_meta_G: Sequence[int], local_rows: int
    ) -> Received: ...

    def combine(self, rows_NC: Tensor, send_G: Sequence[int], receive_G: Sequence[int], local_rows: int) -> Tensor: ...

    def dispatch_slots(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_N2: Tensor, capacity: int, local_rows: int
    ) -> Received: ...

    def combine_slots(
        self, rows_NC: Tensor, received: Received, sent_G: Sequence[int], capacity: int, local_rows: int
    ) -> Tensor: ...

    def gather_rows(self, rows_NC: Tensor, meta_NM: Tensor, counts_G: Sequence[int] | None) -> Received: ...

    def reduce_rows(self, rows_TH: Tensor, counts_G: Sequence[int]) -> Tensor: ...

    def all_reduce(self, x_TH: Tensor) -> Tensor: ...

    def gather_objects(self, value: Any) -> list[Any]: ...

    def close(self) -> None: ...


class PeerTransport(Transport, Protocol):
    """A transport whose ranks can address each other's memory."""

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> PeerBuffer: ...

    def barrier(self) -> None: ...


def address_table(peers_G: Sequence[Tensor]) -> Tensor:
    """int64 addresses of everybody's tensor, on the device of the tensors."""
    return torch.tensor([peer.data_ptr() for peer in peers_G], dtype=torch.int64, device=peers_G[0].device)


def peer_buffer(rank: int, peers_G: list[Tensor]) -> PeerBuffer:
    return PeerBuffer(peers_G[rank], peers_G, address_table(peers_G))
