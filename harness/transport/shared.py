"""SharedTransport: processes of one machine that read and write each other's buffers in shared memory.

Ordering. Every primitive writes staging area p (its own, or its place in a peer's), passes one barrier, reads area p of
the peers, and leaves the other area to its successor. Area p is written again two primitives later, after a barrier that
a rank reaches only when its reads of area p are over: one barrier a primitive is enough, in any sequence of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.dispatch import METADATA_BYTES, DispatchSpec
from semmoe.errors import UserError

from .base import PeerBuffer, Received
from .codec import bytes_of
from .packing import as_rows, fresh, row_bytes
from .pull import PullTransport, peer_buffer, poison
from .shared_memory import SharedMemory


class SharedTransport(PullTransport):
    """Over an initialised process group, used to agree on the memory and to gather objects only.

    stage_bytes: the most bytes that one rank stages in one operation (see `stage_bytes_for`). Pages are touched only
    when used, so a generous size costs nothing but address space. timeout_s: patience for a rank that does not come.
    """

    name = "shared"
    device = torch.device("cpu")

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        stage_bytes: int = 64 << 20,
        arena_bytes: int = 4 << 20,
        timeout_s: float = 60.0,
        kernel_path: str = "torch",
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), kernel_path)
        self.group = group
        self.memory: SharedMemory | None = SharedMemory(group, stage_bytes, arena_bytes, timeout_s)
        self._parity = 0

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> PeerBuffer:
        """A buffer on every rank out of the arena (collective, same arguments everywhere), filled with NaN or zero."""
        peers_G = self._open().alloc(rows, cols, dtype)
        poison(peers_G[self.rank])
        self.barrier()
        return peer_buffer(self.rank, peers_G)

    def barrier(self) -> None:
        """Return when all ranks have called it; RuntimeError that names a rank which does not come in time."""
        self._open().barrier()

    def close(self) -> None:
        self.memory = None

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.ranks
        dist.all_gather_object(out, value, group=self.group)
        return out

    def _publish(self, x: Tensor) -> list[Tensor]:
        stage_GB, table_G = self._next()
        self._stage(stage_GB, bytes_of(x).view(-1))
        table_G[self.rank, 0] = len(x)
        self.barrier()
        width = row_bytes(x)
        rows_G = [int(n) for n in table_G[:, 0]]
        return [as_rows(stage_GB[s, : n * width].view(n, width), x) for s, n in enumerate(rows_G)]

    def _all_to_all(self, flat: Tensor, send_bytes_G: Sequence[int], receive_bytes_G: Sequence[int]) -> Tensor:
        stage_GB, table_G = self._next()
        self._stage(stage_GB, flat)
        table_G[self.rank, : self.ranks] = np.cumsum(send_bytes_G) - np.asarray(send_bytes_G)
        table_G[self.rank, self.ranks : 2 * self.ranks] = send_bytes_G
        self.barrier()
        parts = []
        for s in range(self.ranks):
            start, size = (int(table_G[s, column]) for column in (self.rank, self.ranks + self.rank))
            if size != receive_bytes_G[s]:
                raise RuntimeError(
                    f"rank {self.rank} expects {receive_bytes_G[s]} bytes from rank {s}, which has {size}"
                )
            parts.append(stage_GB[s, start : start + size])
        return torch.cat(parts)

    def _swap_sizes(self, sizes_Gn: Sequence[Sequence[int]]) -> list[list[int]]:
        _, table_G = self._next()
        sizes = np.asarray(sizes_Gn, dtype=np.int64)
        table_G[self.rank, : sizes.size] = sizes.ravel()
        self.barrier()
        width = sizes.shape[1]
        return table_G[:, self.rank * width : (self.rank + 1) * width].tolist()

    def dispatch_slots(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_N2: Tensor, capacity: int, local_rows: int
    ) -> Received:
        """One-sided: rows are written into this rank's places on the peer, and their number beside them."""
        got, rows_G = self._put(torch.cat([bytes_of(meta_N2), bytes_of(rows_NC)], dim=1), send_G, capacity)
        meta, rows = fresh(got[:, :METADATA_BYTES]), fresh(got[:, METADATA_BYTES:])
        self._count("dispatch", row_bytes(rows_NC), send_G, rows_G, local_rows)
        self.counter.metadata(sum(send_G) * METADATA_BYTES, meta.numel())
        return Received(as_rows(rows, rows_NC), meta.view(torch.int32), rows_G, rows_G)

    def combine_slots(
        self, rows_NC: Tensor, received: Received, sent_G: Sequence[int], capacity: int, local_rows: int
    ) -> Tensor:
        got, back_G = self._put(bytes_of(rows_NC), received.rows_G, capacity)
        self._count("combine", row_bytes(rows_NC), received.rows_G, back_G, local_rows)
        return as_rows(got, rows_NC)

    # Helpers.

    def _open(self) -> SharedMemory:
        if self.memory is None:
            raise RuntimeError("shared transport is closed")
        return self.memory

    def _next(self) -> tuple[Tensor, Any]:
        """(staging areas, tables) of this primitive, a row a rank; the next one gets the others."""
        self._parity = 1 - self._parity
        memory = self._open()
        return memory.stages_2G[self._parity], memory.tables_2G[self._parity]

    def _stage(self, stage_GB: Tensor, flat: Tensor) -> None:
        self._check(len(flat))
        stage_GB[self.rank, : len(flat)] = flat

    def _check(self, size: int) -> None:
        reserved = self._open().stage_bytes
        if size > reserved:
            raise UserError(
                f"shared transport: rank {self.rank} stages {size} bytes, {reserved} are reserved; raise stage_bytes or "
                "send fewer tokens a step"
            )

    def _put(self, rows_NB: Tensor, send_G: Sequence[int], capacity: int) -> tuple[Tensor, list[int]]:
        """Write rows into the peers' places [my rank, 0..]; returns the rows that came and how many from each rank."""
        stage_GB, table_G = self._next()
        width = rows_NB.shape[1]
        block = capacity * width
        self._check(self.ranks * block)
        for d, part in enumerate(rows_NB.split(list(send_G))):
            stage_GB[d, self.rank * block :][: part.numel()] = part.reshape(-1)
            table_G[d, self.rank] = len(part)
        self.barrier()
        counts_G = [int(n) for n in table_G[self.rank, : self.ranks]]
        parts = [stage_GB[self.rank, s * block :][: n * width] for s, n in enumerate(counts_G)]
        return torch.cat(parts).view(-1, width), counts_G


def stage_bytes_for(spec: DispatchSpec, tokens: int, ranks: int, max_tokens: int) -> int:
    """Bytes that one operation of a step of `tokens` tokens may stage on a rank, with max_tokens for low_latency."""
    row = max(spec.hidden * 4.0, spec.dispatch_row_bytes, spec.combine_row_bytes) + METADATA_BYTES * spec.top_k
    rows = tokens * max(spec.top_k, ranks)
    if spec.dispatcher == "low_latency":
        rows = max(rows, ranks * max_tokens * spec.top_k)
    return int(max(rows, 1) * row)
