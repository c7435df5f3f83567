"""SharedMemory: PeerMemory of the processes of one machine, in one file that they map together.

The file's name is removed as soon as all have mapped it, so nothing is left behind however the processes end. The
barrier: every rank stores a growing epoch in its own word and waits until all words have reached it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError

from .peer_memory import FIRST_TABLE_WORD, TABLE_WORDS, PeerMemory, region_bytes

SPINS_BEFORE_SLEEP = 2000


class SharedMemory(PeerMemory):
    """Collective. The tables are read and written through numpy, ten times faster than through tensors."""

    def __init__(self, group: dist.ProcessGroup | None, stage_bytes: int, arena_bytes: int, timeout_s: float) -> None:
        rank, ranks, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        size = region_bytes(stage_bytes, arena_bytes)
        memory_GB = _map_shared(rank, ranks * size, group).view(ranks, size)
        super().__init__(rank, list(memory_GB), stage_bytes)
        words: Any = memory_GB.numpy().view(np.int64)
        self._epochs_G = words[:, 0]
        starts = [FIRST_TABLE_WORD + p * TABLE_WORDS for p in range(2)]
        self._tables_2 = [words[:, start : start + TABLE_WORDS] for start in starts]
        self._epoch = 0

    def write_table(self, parity: int, owner: int, start: int, values: Sequence[int] | NDArray[np.int64]) -> None:
        self._tables_2[parity][owner, start : start + len(values)] = values

    def read_table(self, parity: int) -> NDArray[np.int64]:
        return self._tables_2[parity]

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
        f"shared transport needs {size >> 20} MiB in /dev/shm or {tempfile.gettempdir()}; make room there, or send fewer "
        "tokens a step"
    )


_LOCK = threading.Lock()


def _fence() -> None:
    """Keep writes before and reads after the barrier in place: taking a lock is a full fence on every platform."""
    with _LOCK:
        pass
