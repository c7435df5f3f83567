"""SymmetricTransport: GPUs that address each other's memory over NVLink, through torch's symmetric memory.

It differs from `shared` in where the regions come from and in how ranks wait. One tensor a rank is allocated and
rendezvoused; the peers' addresses are those of `get_remote_tensor`, never `buffer_ptrs`, which leave out the tensor's
offset in a pooled segment. Barriers use pads of our own in that memory (the library's belong to the segment, which
others may share), inside the kernels or as a kernel of their own. They are ordered by the stream: the host does not wait.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from .peer_memory import PeerMemory, region_bytes
from .staged import ARENA_BYTES, StagedTransport
from .symmetric_checks import require_symmetric

SPIN_LIMIT = 1 << 24  # polls of a missing rank's flag, about a microsecond each: an error instead of a hang


class SymmetricMemory(PeerMemory):
    """Collective, on the current CUDA device of every rank."""

    def __init__(self, group: dist.ProcessGroup | None, stage_bytes: int, arena_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        from ..kernels.launch import WAITING_BLOCKS, barrier_state

        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        size = region_bytes(stage_bytes, arena_bytes)
        local = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        whole: Any = group or dist.group.WORLD
        handle = symmetric.rendezvous(local, whole)
        regions_G = [
            local if peer == rank else handle.get_remote_tensor(peer, (size,), torch.uint8) for peer in range(ranks)
        ]
        super().__init__(rank, regions_G, stage_bytes)
        self._handle = handle  # keeps the peers' mappings alive
        local.zero_()
        torch.cuda.synchronize()
        dist.barrier(group)  # all pads are zero
        pads_G = self.alloc(WAITING_BLOCKS, ranks, torch.int32)
        self.state = barrier_state(pads_G, rank, WAITING_BLOCKS, SPIN_LIMIT)

    def barrier(self) -> None:
        from ..kernels.launch import launch_barrier

        launch_barrier(self.state, self.rank)

    def read_table(self, parity: int) -> NDArray:
        table_GN = super().read_table(parity)
        self.state.check()
        return table_GN


class SymmetricTransport(StagedTransport):
    """One rank a GPU, all on one machine. UserError where that cannot be, with what is missing."""

    name = "symmetric"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        stage_bytes: int = 64 << 20,
        arena_bytes: int = ARENA_BYTES,
        kernel_path: str = "triton",
    ) -> None:
        require_symmetric(dist.get_world_size(group))
        memory = SymmetricMemory(group, stage_bytes, arena_bytes)
        super().__init__(memory, group, kernel_path, memory.state if kernel_path == "triton" else None)
