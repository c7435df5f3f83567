"""CollectiveTransport: torch.distributed calls only (gloo or NCCL); works wherever a process group does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .codec import bytes_of
from .rows import RowTransport


class CollectiveTransport(RowTransport):
    """Over an initialised process group.

    gloo has no uneven all-gather, so that one is an all-to-all of copies. Its reduce-scatter costs several times the
    all-to-all that brings the same rows (4 ranks on 2 cores, 512 x 128 fp32: 16.4 ms against 2.6 ms), so that one is an
    all-to-all and a sum here, in fp32; its all-reduce is the fastest there is and stays.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group, self.device = group, torch.device(device)
        self._native_reduce_scatter = self.device.type == "cuda"  # NCCL

    def _all_to_all(self, flat: Tensor, send_bytes_G: Sequence[int], receive_bytes_G: Sequence[int]) -> Tensor:
        got = torch.empty(sum(receive_bytes_G), dtype=torch.uint8, device=flat.device)
        dist.all_to_all_single(got, flat, list(receive_bytes_G), list(send_bytes_G), group=self.group)
        return got

    def _swap_sizes(self, sizes_Gn: Sequence[Sequence[int]]) -> list[list[int]]:
        mine = torch.tensor(sizes_Gn, dtype=torch.int64, device=self.device)
        got = torch.empty_like(mine)
        dist.all_to_all_single(got, mine, group=self.group)
        return got.tolist()

    def _reduce_scatter(self, chunks_G: list[Tensor]) -> Tensor:
        if self._native_reduce_scatter:
            out = torch.empty_like(chunks_G[self.rank])
            dist.reduce_scatter(out, [c.contiguous() for c in chunks_G], group=self.group)
            return out
        own = chunks_G[self.rank]
        sizes = [0 if d == self.rank else c.numel() * c.element_size() for d, c in enumerate(chunks_G)]
        came = [0 if s == self.rank else own.numel() * own.element_size() for s in range(self.ranks)]
        flat = torch.cat([bytes_of(c).view(-1) for d, c in enumerate(chunks_G) if d != self.rank] or [own.new_empty(0)])
        parts = list(self._all_to_all(flat.view(torch.uint8), sizes, came).split(came))
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for s, part in enumerate(parts):  # in rank order: the same bits whichever rank sums
            total += own if s == self.rank else part.view(own.dtype).view(own.shape)
        return total.to(own.dtype)

    def _all_reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.ranks
        dist.all_gather_object(out, value, group=self.group)
        return out
