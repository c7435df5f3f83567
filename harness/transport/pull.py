"""PullTransport: what transports share whose ranks can read each other's tensors: everything is pulled.

A subclass has `_publish(x)`, which makes x readable by all and returns everybody's once all are there, and `_release()`,
called when this rank has read them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from semmoe.errors import UserError, nearest

from ..reference import shuffle
from .base import PeerBuffer, RowTransport
from .packing import row_bytes
from .plan import ShufflePlan

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

    def _publish(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor in rank order. Row shapes and dtypes agree; the number of rows may differ."""
        raise NotImplementedError

    def _release(self) -> None:
        """This rank has read what the last `_publish` gave it."""

    def srs(self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None = None, op: str = "srs") -> Tensor:
        peers_G = self._publish(x_TH)
        if self.kernel_path == "triton":
            from ..kernels.launch import launch_srs

            with _ONE_LAUNCH:
                rows_nH, counted_G = launch_srs(address_table(peers_G), x_TH, plan, self.rank, residual_TH)
            pulled_G = counted_G.tolist()
        else:
            rows_nH, pulled_G = shuffle.srs(peers_G, plan, self.rank, residual_TH)
        self._release()
        self.counter.exchange(op, row_bytes(x_TH), plan.counts_G, pulled_G)
        return rows_nH

    def sag(self, rows_NC: Tensor, plan: ShufflePlan, op: str = "sag") -> Tensor:
        peers_G = self._publish(rows_NC)
        if self.kernel_path == "triton":
            from ..kernels.launch import launch_sag

            with _ONE_LAUNCH:
                out_TC, counted_G = launch_sag(address_table(peers_G), rows_NC, plan)
            pulled_G = counted_G.tolist()
        else:
            out_TC, pulled_G = shuffle.sag(peers_G, plan)
        self._release()
        self.counter.exchange(op, row_bytes(rows_NC), [len(rows_NC)] * self.ranks, pulled_G)
        return out_TC

    def _gather(self, bytes_NB: Tensor, counts_G: Sequence[int]) -> tuple[Tensor, list[int]]:
        parts = [peer[:n] for peer, n in zip(self._publish(bytes_NB), counts_G, strict=True)]
        out = torch.cat(parts)
        self._release()
        return out, [len(p) for p in parts]

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


def address_table(peers_G: Sequence[Tensor]) -> Tensor:
    """int64 addresses of everybody's tensor, on the device of the tensors."""
    return torch.tensor([peer.data_ptr() for peer in peers_G], dtype=torch.int64, device=peers_G[0].device)


def peer_buffer(rank: int, peers_G: list[Tensor]) -> PeerBuffer:
    return PeerBuffer(peers_G[rank], peers_G, address_table(peers_G))


def poison(buffer: Tensor) -> Tensor:
    """Fill with NaN (integers: zero): what nobody writes stays visible."""
    return buffer.fill_(float("nan") if buffer.dtype.is_floating_point else 0)
