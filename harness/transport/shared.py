"""SharedTransport: processes of one machine that read and write each other's buffers in shared memory."""

from __future__ import annotations

import torch.distributed as dist

from .shared_memory import SharedMemory
from .staged import ARENA_BYTES, StagedTransport


class SharedTransport(StagedTransport):
    """Over an initialised process group, used to agree on the memory and to gather objects only.

    stage_bytes: the most bytes that one rank stages in one operation (see `stage_bytes_for`). Pages are touched only
    when used, so a generous size costs nothing but address space. timeout_s: patience for a rank that does not come.
    fused_blocks > 0: the kernels (kernel_path "triton", in the interpreter) wait for their peers themselves, in so many
    blocks.
    """

    name = "shared"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        stage_bytes: int = 64 << 20,
        arena_bytes: int = ARENA_BYTES,
        timeout_s: float = 60.0,
        kernel_path: str = "torch",
        fused_blocks: int = 0,
    ) -> None:
        super().__init__(SharedMemory(group, stage_bytes, arena_bytes, timeout_s), group, kernel_path)
        if fused_blocks:
            from ..kernels.launch import make_barrier

            self.fused = make_barrier(self, fused_blocks)
