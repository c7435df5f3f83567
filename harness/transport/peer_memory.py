"""PeerMemory: the same region of memory on every rank, which all ranks of the group can address, and a barrier.

A region holds a control page (an epoch word and two tables of sizes), two staging areas and an arena:

    [ epoch | table 0 | table 1 | stage 0 | stage 1 | arena ]

What differs between memories is only how the regions are mapped and how ranks wait: `SharedMemory` (CPU processes) and
`SymmetricMemory` (GPUs).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError

CONTROL_BYTES = 8192  # epoch word in the first 64 bytes, then two tables of sizes
FIRST_TABLE_WORD, TABLE_WORDS = 8, 500
ALIGN = 256


class PeerMemory:
    """stages_2G[p][r]: staging area p of rank r, flat uint8. `alloc` takes from the arenas; see `region_bytes`.

    A subclass has `barrier`, and may read and write the tables faster.
    """

    def __init__(self, rank: int, regions_G: Sequence[Tensor], stage_bytes: int) -> None:
        self.rank, self.ranks = rank, len(regions_G)
        self.device, self.stage_bytes = regions_G[rank].device, aligned(stage_bytes)
        self._regions_G = regions_G
        areas = [CONTROL_BYTES, CONTROL_BYTES + self.stage_bytes]
        self.stages_2G = [[region[start : start + self.stage_bytes] for region in regions_G] for start in areas]
        self._arena_next = CONTROL_BYTES + 2 * self.stage_bytes

    def barrier(self) -> None:
        """Return (on a GPU: let what is launched next begin) when all ranks have called it."""
        raise NotImplementedError

    def write_table(self, parity: int, owner: int, start: int, values: Sequence[int] | NDArray[np.int64]) -> None:
        """Write int64 values into table `parity` of rank `owner`; seen by all after the next barrier."""
        at = FIRST_TABLE_WORD + parity * TABLE_WORDS + start
        words = self._regions_G[owner][8 * at : 8 * (at + len(values))].view(torch.int64)
        words.copy_(torch.as_tensor(np.asarray(values, dtype=np.int64)))

    def read_table(self, parity: int) -> NDArray[np.int64]:
        """[G, words] of all ranks, on the host."""
        at = 8 * (FIRST_TABLE_WORD + parity * TABLE_WORDS)
        rows = [region[at : at + 8 * TABLE_WORDS].view(torch.int64) for region in self._regions_G]
        return np.asarray(torch.stack(rows).cpu().numpy())

    def alloc(self, rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
        """A [rows, cols] tensor of every rank, in rank order; the same arguments on all ranks."""
        size, start = rows * cols * dtype.itemsize, self._arena_next
        if start + size > len(self._regions_G[self.rank]):
            raise UserError(f"{size} bytes do not fit into the arena of the ranks' memory; raise arena_bytes")
        self._arena_next = start + aligned(size)
        return [region[start : start + size].view(dtype).view(rows, cols) for region in self._regions_G]


def region_bytes(stage_bytes: int, arena_bytes: int) -> int:
    """Size of one rank's region with two staging areas of stage_bytes."""
    return CONTROL_BYTES + 2 * aligned(stage_bytes) + aligned(arena_bytes)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
