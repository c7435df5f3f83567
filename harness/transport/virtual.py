"""VirtualTransport: all ranks as threads of one process, for tests and for kernels in Triton's interpreter.

Nothing is timed here and no link speed follows from it: a "send" hands over a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .base import PeerBuffer, peer_buffer
from .pull import PullTransport, poison

Result = TypeVar("Result")


class _Meeting:
    """Where the virtual ranks meet: each leaves a value, and takes everybody's when all have come."""

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.values: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=timeout_s)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        everybody = list(self.values)
        self.barrier.wait()  # nobody may leave the next value before all have taken these
        return everybody


class VirtualTransport(PullTransport):
    """One of several ranks of a process; made by `run_virtual`."""

    name = "virtual"

    def __init__(self, rank: int, ranks: int, meeting: _Meeting, kernel_path: str = "torch") -> None:
        super().__init__(rank, ranks, kernel_path)
        self.device = torch.device("cpu")
        self._meeting = meeting

    def _all_to_all(self, flat: Tensor, send_bytes_G: Sequence[int], receive_bytes_G: Sequence[int]) -> Tensor:
        everybody = self._meeting.swap(self.rank, flat.split(list(send_bytes_G)))
        parts = [parts_G[self.rank].clone() for parts_G in everybody]
        if [len(p) for p in parts] != list(receive_bytes_G):
            raise ValueError(f"rank {self.rank} expected {list(receive_bytes_G)} bytes, got {[len(p) for p in parts]}")
        self._meeting.barrier.wait()
        return torch.cat(parts)

    def _swap_sizes(self, sizes_Gn: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(rows[self.rank]) for rows in self._meeting.swap(self.rank, sizes_Gn)]

    def _publish_parts(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        everybody = self._meeting.swap(self.rank, list(parts))
        return [list(peers_G) for peers_G in zip(*everybody, strict=True)]

    def _lend(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(rows, cols, dtype=dtype, device=device)

    def _lent(self, local: Tensor) -> tuple[list[Tensor], None]:
        return self._publish(local), None

    def _release(self) -> None:
        self._meeting.barrier.wait()

    def gather_objects(self, value: Any) -> list[Any]:
        return self._meeting.swap(self.rank, value)

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> PeerBuffer:
        """A buffer on every rank (collective), filled with NaN where the dtype has it, so that unused rows show."""
        return peer_buffer(
            self.rank, self._meeting.swap(self.rank, poison(torch.empty(rows, cols, dtype=dtype, device=self.device)))
        )

    def barrier(self) -> None:
        self._meeting.barrier.wait()


def run_virtual(
    ranks: int, body: Callable[[VirtualTransport], Result], kernel_path: str = "torch", timeout_s: float = 60.0
) -> list[Result]:
    """body(transport) on every virtual rank at once; results in rank order, or the first rank's own error."""
    meeting = _Meeting(ranks, timeout_s)
    results: list[Any] = [None] * ranks
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(VirtualTransport(rank, ranks, meeting, kernel_path))
        except BaseException as error:
            errors.append((rank, error))
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = [e for _, e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise own[0] if own else errors[0][1]
    return results
