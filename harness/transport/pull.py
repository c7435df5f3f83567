"""PullTransport: what transports share whose ranks can read each other's tensors: everything is pulled.

A subclass has `_publish_parts`, which makes tensors readable by all and returns everybody's once all are there, `_lend`
and `_lent` for results that a kernel writes where peers read them, and `_release`, called when this rank has read them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semmoe.errors import UserError, nearest

from ..reference import shuffle
from .base import PeerBuffer, address_table
from .packing import row_bytes
from .plan import ShufflePlan
from .rows import RowTransport

if TYPE_CHECKING:
    from ..kernels.launch import BarrierState, RMSNorm

KERNEL_PATHS = ("torch", "triton")
_ONE_LAUNCH = threading.Lock()  # Triton's interpreter is not safe with threads


class PullTransport(RowTransport):
    """kernel_path: "torch" pulls with the twins of `harness.reference.shuffle` (timed CPU runs); "triton" with the
    kernels of `harness.kernels`, on a CPU in the interpreter (correctness only; set TRITON_INTERPRET=1 first)."""

    def __init__(self, rank: int, ranks: int, kernel_path: str = "torch") -> None:
        super().__init__(rank, ranks)
        if kernel_path not in KERNEL_PATHS:
            raise UserError(f"kernel_path '{kernel_path}'{nearest(kernel_path, KERNEL_PATHS)}")
        self.kernel_path = kernel_path
        self._fixed: PeerBuffer | None = None

    def _publish_parts(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Everybody's tensors, each in rank order, once all are there. Row shapes and dtypes agree; the number of rows
        may differ between ranks, not between the parts of one."""
        raise NotImplementedError

    def _offer(self, parts: Sequence[Tensor], rows_G: Sequence[int]) -> tuple[list[list[Tensor]], BarrierState | None]:
        """As `_publish_parts` for a kernel that waits for its peers itself, with the state to wait with; or, where it
        need not wait, None. rows_G: rows of every rank's parts."""
        return self._publish_parts(parts), None

    def _lend(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of this rank to write into, which `_lent` shows to the peers. Nothing may be published in between."""
        raise NotImplementedError

    def _lent(self, local: Tensor) -> tuple[list[Tensor], BarrierState | None]:
        """Everybody's lent buffer, of the same shape; see `_offer`."""
        raise NotImplementedError

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> PeerBuffer:
        raise NotImplementedError

    def fixed_memory(self, size: int) -> PeerBuffer:
        """Bytes of every rank that stay where they are, for captured layers; one area, for one run after another.
        Collective."""
        if self._fixed is None or len(self._fixed.local) < size:
            self._fixed = self.alloc(size, 1, torch.uint8)
        return self._fixed

    def _publish(self, x: Tensor) -> list[Tensor]:
        return self._publish_parts([x])[0]

    def _release(self) -> None:
        """This rank has read what it was given last."""

    def srs(self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None = None, op: str = "srs") -> Tensor:
        if self.kernel_path == "triton":
            return self._srs_by_kernel(x_TH, plan, residual_TH, None, op)
        rows_nH, pulled_G = shuffle.srs(self._publish(x_TH), plan, self.rank, residual_TH)
        self._release()
        self.counter.exchange(op, row_bytes(x_TH), plan.counts_G, pulled_G)
        return rows_nH

    def srs_norm(
        self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None, norm_H: Tensor, op: str = "srs"
    ) -> tuple[Tensor, Tensor]:
        if self.kernel_path != "triton":
            return super().srs_norm(x_TH, plan, residual_TH, norm_H, op)
        from ..kernels.launch import RMSNorm

        norm = RMSNorm(norm_H, x_TH.new_empty(plan.counts_G[self.rank], x_TH.shape[1]))
        return self._srs_by_kernel(x_TH, plan, residual_TH, norm, op), norm.out_NH

    def _srs_by_kernel(
        self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None, norm: RMSNorm | None, op: str
    ) -> Tensor:
        from ..kernels.launch import launch_srs

        (peers_G,), barrier = self._offer([x_TH], [plan.tokens] * self.ranks)
        with launching(x_TH.device):
            rows_nH, counted_BG = launch_srs(
                address_table(peers_G), x_TH, plan, self.rank, residual_TH, barrier=barrier, norm=norm
            )
        pulled_G = counted_by(counted_BG, barrier)
        self._release()
        self.counter.exchange(op, row_bytes(x_TH), plan.counts_G, pulled_G)
        return rows_nH

    def sag(self, rows_NC: Tensor, plan: ShufflePlan, op: str = "sag") -> Tensor:
        if self.kernel_path == "triton":
            return self._sag_by_kernel([rows_NC], plan, [op])[0]
        out_TC, pulled_G = shuffle.sag(self._publish(rows_NC), plan)
        self._release()
        self.counter.exchange(op, row_bytes(rows_NC), [len(rows_NC)] * self.ranks, pulled_G)
        return out_TC

    def sag_with_ids(
        self, rows_NC: Tensor, ids_Nk: Tensor, plan: ShufflePlan, op: str = "sag"
    ) -> tuple[Tensor, Tensor]:
        if self.kernel_path == "triton":
            out_TC, ids_Tk = self._sag_by_kernel([rows_NC, ids_Nk], plan, [op, "expert_ids"])
            return out_TC, ids_Tk
        peers = self._publish_parts([rows_NC, ids_Nk])
        (out_TC, pulled_G), (ids_Tk, _) = (shuffle.sag(peers_G, plan) for peers_G in peers)
        self._release()
        for part, name in ((rows_NC, op), (ids_Nk, "expert_ids")):
            self.counter.exchange(name, row_bytes(part), [len(part)] * self.ranks, pulled_G)
        return out_TC, ids_Tk

    def _sag_by_kernel(self, parts: list[Tensor], plan: ShufflePlan, ops: list[str]) -> list[Tensor]:
        """SAG of the rows and, in the same launch, of the ids beside them."""
        from ..kernels.launch import CarriedIds, launch_sag

        peers, barrier = self._offer(parts, plan.counts_G)
        tables = [address_table(peers_G) for peers_G in peers]
        ids = None
        if len(parts) > 1:
            ids = CarriedIds(tables[1], parts[1].new_empty(plan.tokens, parts[1].shape[1]))
        with launching(parts[0].device):
            out_TC, counted_BG = launch_sag(tables[0], parts[0], plan, self.rank, barrier=barrier, ids=ids)
        pulled_G = counted_by(counted_BG, barrier)
        self._release()
        for part, op in zip(parts, ops, strict=True):
            self.counter.exchange(op, row_bytes(part), [len(part)] * self.ranks, pulled_G)
        return [out_TC] if ids is None else [out_TC, ids.out_Tk]

    def _gather(self, parts: Sequence[Tensor], counts_G: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        pulled = [
            [peer[:n] for peer, n in zip(peers_G, counts_G, strict=True)] for peers_G in self._publish_parts(parts)
        ]
        gathered = [torch.cat(rows_G) for rows_G in pulled]
        self._release()
        return gathered, [len(rows) for rows in pulled[0]]

    def _reduce_scatter(self, chunks_G: list[Tensor]) -> Tensor:
        flat = torch.cat(chunks_G)
        start = sum(len(c) for c in chunks_G[: self.rank])
        mine = slice(start, start + len(chunks_G[self.rank]))
        total = torch.zeros(chunks_G[self.rank].shape, dtype=torch.float32, device=flat.device)
        for peer in self._publish(flat):
            total += peer[mine]
        self._release()
        return total.to(flat.dtype)

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Reduce-scatter, then all-gather: each moves (G - 1) / G of the rows, as the count of an all-reduce says."""
        chunks = list(x.tensor_split(self.ranks))
        mine = self._reduce_scatter(chunks)
        peers_G = self._publish(mine)
        out = torch.cat([peer[: len(c)] for peer, c in zip(peers_G, chunks, strict=True)])
        self._release()
        return out


def counted_by(counted_BG: Tensor, barrier: BarrierState | None) -> list[int]:
    """Counts of a kernel's blocks, summed, on the host; RuntimeError when it gave up waiting for a peer."""
    counts = counted_BG.sum(dim=0).tolist()
    if barrier is not None:
        barrier.check()
    return counts


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Around a launch: virtual ranks are threads, which the interpreter must not see at once."""
    return contextlib.nullcontext() if device.type == "cuda" else _ONE_LAUNCH


def poison(buffer: Tensor) -> Tensor:
    """Fill with NaN (integers: zero): what nobody writes stays visible."""
    return buffer.fill_(float("nan") if buffer.dtype.is_floating_point else 0)
