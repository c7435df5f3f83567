"""StagedTransport: ranks that read and write each other's buffers in PeerMemory, of CPU processes or of GPUs.

Ordering. Every primitive writes staging area p (its own, or its place in a peer's), passes one barrier, reads area p of
the peers, and leaves the other area to its successor. Area p is written again two primitives later, after a barrier that
a rank reaches only when its reads of area p are over: one barrier a primitive is enough, in any sequence of operations.
The barrier is the memory's, or the one fused into a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.dispatch import METADATA_BYTES, DispatchSpec
from semmoe.errors import UserError

from .base import PeerBuffer, Received, peer_buffer
from .codec import bytes_of
from .packing import as_rows, fresh, row_bytes
from .peer_memory import PeerMemory, aligned
from .pull import PullTransport, poison

if TYPE_CHECKING:
    from ..kernels.launch import BarrierState

ARENA_BYTES = 4 << 20  # of a rank, for `alloc`


class StagedTransport(PullTransport):
    """Over an initialised process group, used to gather objects only.

    fused: the state of the barrier inside kernels, where they shall wait for their peers themselves.
    """

    def __init__(
        self, memory: PeerMemory, group: dist.ProcessGroup | None, kernel_path: str, fused: BarrierState | None = None
    ) -> None:
        super().__init__(memory.rank, memory.ranks, kernel_path)
        self.memory: PeerMemory | None = memory
        self.group, self.device, self.fused = group, memory.device, fused
        self._parity = 0

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> PeerBuffer:
        """A buffer on every rank out of the arena (collective, same arguments everywhere), filled with NaN or zero."""
        peers_G = self._open().alloc(rows, cols, dtype)
        poison(peers_G[self.rank])
        self.barrier()
        return peer_buffer(self.rank, peers_G)

    def barrier(self) -> None:
        """See PeerMemory.barrier."""
        self._open().barrier()

    def close(self) -> None:
        self.memory = None

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.ranks
        dist.all_gather_object(out, value, group=self.group)
        return out

    def _publish_parts(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        memory, parity = self._next()
        self._stage(parity, parts)
        memory.write_table(parity, self.rank, 0, [len(parts[0])])
        memory.barrier()
        return self._views(parity, parts, memory.read_table(parity)[:, 0].tolist())

    def _offer(self, parts: Sequence[Tensor], rows_G: Sequence[int]) -> tuple[list[list[Tensor]], BarrierState | None]:
        if self.fused is None:
            return super()._offer(parts, rows_G)
        _, parity = self._next()
        self._stage(parity, parts)
        return self._views(parity, parts, rows_G), self.fused

    def _lend(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory, parity = self._next()
        size = rows * cols * dtype.itemsize
        self._check(size)
        return memory.stages_2G[parity][self.rank][:size].view(dtype).view(rows, cols)

    def _lent(self, local: Tensor) -> tuple[list[Tensor], BarrierState | None]:
        memory = self._open()
        if self.fused is None:
            memory.barrier()
        size = local.numel() * local.element_size()
        stages = memory.stages_2G[self._parity]
        return [stage[:size].view(local.dtype).view(local.shape) for stage in stages], self.fused

    def _all_to_all(self, flat: Tensor, send_bytes_G: Sequence[int], receive_bytes_G: Sequence[int]) -> Tensor:
        memory, parity = self._next()
        self._stage(parity, [flat])
        starts = np.cumsum(send_bytes_G) - np.asarray(send_bytes_G)
        memory.write_table(parity, self.rank, 0, np.concatenate([starts, np.asarray(send_bytes_G)]))
        memory.barrier()
        columns_G2 = memory.read_table(parity)[:, [self.rank, self.ranks + self.rank]].tolist()
        parts = []
        for s, (start, size) in enumerate(columns_G2):
            if size != receive_bytes_G[s]:
                raise RuntimeError(
                    f"rank {self.rank} expects {receive_bytes_G[s]} bytes from rank {s}, which has {size}"
                )
            parts.append(memory.stages_2G[parity][s][start : start + size])
        return torch.cat(parts)

    def _swap_sizes(self, sizes_Gn: Sequence[Sequence[int]]) -> list[list[int]]:
        memory, parity = self._next()
        sizes = np.asarray(sizes_Gn, dtype=np.int64)
        memory.write_table(parity, self.rank, 0, sizes.ravel())
        memory.barrier()
        width = sizes.shape[1]
        return memory.read_table(parity)[:, self.rank * width : (self.rank + 1) * width].tolist()

    def dispatch(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_M2: Tensor, send_meta_G: Sequence[int], local_rows: int
    ) -> Received:
        """Rows and metadata are staged as they are, sizes beside them, and the peers take their parts: one barrier, and no
        packing into one message as libraries need it (at 5 MB from each of 4 ranks, two copies fewer of six)."""
        memory, parity = self._next()
        self._stage(parity, [rows_NC, meta_M2])
        memory.write_table(parity, self.rank, 0, [*send_G, *send_meta_G])
        memory.barrier()
        sent_G2G = memory.read_table(parity)[:, : 2 * self.ranks].reshape(self.ranks, 2, self.ranks)
        widths, skipped_G = (row_bytes(rows_NC), METADATA_BYTES), np.zeros(self.ranks, dtype=np.int64)
        came, sizes_2G = [], sent_G2G[:, :, self.rank].T.tolist()
        for part, width in enumerate(widths):
            first_G = skipped_G + sent_G2G[:, part, : self.rank].sum(axis=1) * width
            views = [
                stage[int(first) :][: n * width].view(n, width)
                for stage, first, n in zip(memory.stages_2G[parity], first_G, sizes_2G[part], strict=True)
            ]
            came.append(torch.cat(views))
            skipped_G = np.array([aligned(int(n) * width) for n in sent_G2G[:, part].sum(axis=1)])
        rows, meta = came
        rows_G, meta_G = sizes_2G
        self._count("dispatch", widths[0], send_G, rows_G, local_rows)
        self.counter.metadata(sum(send_meta_G) * METADATA_BYTES, len(meta) * METADATA_BYTES)
        return Received(as_rows(rows, rows_NC), as_rows(meta, meta_M2), rows_G, meta_G)

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

    def _open(self) -> PeerMemory:
        if self.memory is None:
            raise RuntimeError(f"{self.name} transport is closed")
        return self.memory

    def _next(self) -> tuple[PeerMemory, int]:
        """(memory, staging area and table of this primitive); the next one gets the others."""
        self._parity = 1 - self._parity
        return self._open(), self._parity

    def _stage(self, parity: int, parts: Sequence[Tensor]) -> None:
        """Copy the parts into this rank's area, each at an aligned offset."""
        own = self._open().stages_2G[parity][self.rank]
        start = 0
        for part in parts:
            flat = bytes_of(part).view(-1)
            self._check(start + len(flat))
            own[start : start + len(flat)] = flat
            start = aligned(start + len(flat))

    def _views(self, parity: int, parts: Sequence[Tensor], rows_G: Sequence[int]) -> list[list[Tensor]]:
        """Every part of every rank, as `_stage` laid it there; rows_G: how many rows its parts have."""
        stages_G = self._open().stages_2G[parity]
        starts_G, views = [0] * self.ranks, []
        for part in parts:
            width, peers_G = row_bytes(part), []
            for s, n in enumerate(rows_G):
                peers_G.append(as_rows(stages_G[s][starts_G[s] :][: n * width].view(n, width), part))
                starts_G[s] = aligned(starts_G[s] + n * width)
            views.append(peers_G)
        return views

    def _check(self, size: int) -> None:
        reserved = self._open().stage_bytes
        if size > reserved:
            raise UserError(
                f"{self.name} transport: rank {self.rank} stages {size} bytes, {reserved} are reserved; raise stage_bytes "
                "or send fewer tokens a step"
            )

    def _put(self, rows_NB: Tensor, send_G: Sequence[int], capacity: int) -> tuple[Tensor, list[int]]:
        """Write rows into the peers' places [my rank, 0..]; returns the rows that came and how many from each rank."""
        memory, parity = self._next()
        stages_G, width = memory.stages_2G[parity], rows_NB.shape[1]
        block = capacity * width
        self._check(self.ranks * block)
        for d, part in enumerate(rows_NB.split(list(send_G))):
            stages_G[d][self.rank * block :][: part.numel()] = part.reshape(-1)
            memory.write_table(parity, d, self.rank, [len(part)])
        memory.barrier()
        counts_G = memory.read_table(parity)[self.rank, : self.ranks].tolist()
        parts = [stages_G[self.rank][s * block :][: n * width] for s, n in enumerate(counts_G)]
        return torch.cat(parts).view(-1, width), counts_G


def stage_bytes_for(spec: DispatchSpec, tokens: int, ranks: int, max_tokens: int) -> int:
    """Bytes that one operation of a step of `tokens` tokens may stage on a rank, with max_tokens for low_latency."""
    row = max(spec.hidden * 4.0, spec.dispatch_row_bytes, spec.combine_row_bytes) + METADATA_BYTES * spec.top_k
    rows = tokens * max(spec.top_k, ranks)
    if spec.dispatcher == "low_latency":
        rows = max(rows, ranks * max_tokens * spec.top_k)
    return aligned(int(max(rows, 1) * row)) + aligned(tokens * 2 * spec.top_k)
