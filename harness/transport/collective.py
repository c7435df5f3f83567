"""CollectiveTransport: torch.distributed calls only (gloo or NCCL); works wherever a process group does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import RowTransport


class CollectiveTransport(RowTransport):
    """Over an initialised process group. gloo has no uneven all-gather, so that one is an all-to-all of copies."""

    name = "collective"

    def __init__(self, group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group, self.device = group, torch.device(device)

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
        out = torch.empty_like(chunks_G[self.rank])
        dist.reduce_scatter(out, [c.contiguous() for c in chunks_G], group=self.group)
        return out

    def _all_reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=self.group)
        return out

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.ranks
        dist.all_gather_object(out, value, group=self.group)
        return out
