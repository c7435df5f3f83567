"""SharedMemory: one file that the processes of a machine map together, with a region a rank and a barrier.

A region holds an epoch word, two tables of sizes, two staging areas and an arena. The file's name is removed as soon as
all have mapped it, so nothing is left behind however the processes end.
The barrier: every rank stores a growing epoch in its own word and waits until all words have reached it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.errors import UserError

CONTROL_BYTES = 8192  # epoch word in the first 64 bytes, then two tables of sizes
TABLE_WORDS = 500
ALIGN = 256
SPINS_BEFORE_SLEEP = 2000


class SharedMemory:
    """stages_2G[p][r], tables_2G[p][r]: staging area p and table p of rank r; `alloc` takes from the arenas."""

    def __init__(self, group: dist.ProcessGroup | None, stage_bytes: int, arena_bytes: int, timeout_s: float) -> None:
        self.rank, self.ranks, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self.stage_bytes, arena_bytes = (-(-size // ALIGN) * ALIGN for size in (stage_bytes, arena_bytes))
        self._region_bytes = CONTROL_BYTES + 2 * self.stage_bytes + arena_bytes
        memory = _map_shared(self.rank, self.ranks * self._region_bytes, group).view(self.ranks, self._region_bytes)
        words: Any = memory.numpy().view(np.int64)
        self._memory_GB = memory
        self._epochs_G = words[:, 0]
        self.tables_2G = [words[:, 8 + p * TABLE_WORDS : 8 + (p + 1) * TABLE_WORDS] for p in range(2)]
        self.stages_2G = [memory[:, CONTROL_BYTES + p * self.stage_bytes :][:, : self.stage_bytes] for p in range(2)]
        self._arena_next = CONTROL_BYTES + 2 * self.stage_bytes
        self._epoch = 0

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
        """A [rows, cols] tensor of every rank, in rank order; the same arguments on all ranks."""
        size = rows * cols * dtype.itemsize
        start = self._arena_next
        if start + size > self._region_bytes:
            raise UserError(f"shared transport: {size} bytes do not fit into the arena; raise arena_bytes")
        self._arena_next = start + -(-size // ALIGN) * ALIGN
        return [self._memory_GB[g, start : start + size].view(dtype).view(rows, cols) for g in range(self.ranks)]

    def barrier(self) -> None:
        """Return when all ranks have called it; RuntimeError that names a rank which does not come in time."""
        self._epoch += 1
        _fence()
        self._epochs_G[self.rank] = self._epoch
        spins, started = 0, time.monotonic()
        while not (self._epochs_G >= self._epoch).all():
            spins += 1
            if spins < SPINS_BEFORE_SLEEP:
                os.sched_yield()  # ranks may outnumber cores: let the late one run
                continue
            time.sleep(5e-5)
            if time.monotonic() - started > self.timeout_s:
                late = int(np.argmin(self._epochs_G))
                raise RuntimeError(f"rank {self.rank} waited {self.timeout_s:g} s for rank {late} in a barrier")
        _fence()


def _map_shared(rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """One file of `size` zero bytes, mapped by all ranks; its name is gone when this returns."""
    name: list[str | None] = [None]
    if rank == 0:
        handle, name[0] = tempfile.mkstemp(prefix="semmoe-", dir=_directory(size))
        os.truncate(handle, size)
        os.close(handle)
    dist.broadcast_object_list(name, group_src=0, group=group)
    memory = torch.from_file(str(name[0]), shared=True, size=size, dtype=torch.uint8)
    dist.barrier(group)
    if rank == 0:
        os.unlink(str(name[0]))
    return memory


def _directory(size: int) -> str:
    """Memory-backed where it has room, else the temporary directory; UserError when neither has.

    A temporary directory that is memory-backed itself comes first: a pool of ranks removes its own whatever happens.
    """
    folders = ["/dev/shm", tempfile.gettempdir()]
    for folder in folders[::-1] if folders[1].startswith("/dev/shm/") else folders:
        if os.path.isdir(folder):
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize >= size:
                return folder
    raise UserError(
        f"shared transport needs {size >> 20} MiB in /dev/shm or {tempfile.gettempdir()}; set stage_bytes lower"
    )


_LOCK = threading.Lock()


def _fence() -> None:
    """Keep writes before and reads after the barrier in place: taking a lock is a full fence on every platform."""
    with _LOCK:
        pass
