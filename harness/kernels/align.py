"""Block alignment: assignments sorted by slot, each slot's list padded to whole blocks, for a grouped product.

    sorted[p]      the assignment at place p: those of slot 0 in their order, then of slot 1, ...; `A` on padding
    block_slot[b]  the slot of places b * BLOCK_M ... (b + 1) * BLOCK_M - 1
    blocks         how many blocks there are

Slots without assignments have no block, and assignments with slot < 0 (served elsewhere) no place: a product over
`blocks` blocks never meets an absent expert.

Worked example, BLOCK_M = 2, 3 slots, slot_A [2, 0, -1, 2, 2]: sorted [1, 5, 0, 3, 4, 5], block_slot [0, 2, 2], blocks 3.

Memory ordering: as in `rank_tokens`; the number of blocks stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .counting import MAX_PROGRAMS, ONE_LAUNCH_TILES, before_and_total, count_kernel, one_hot
from .rank_tokens import spans


@dataclass(frozen=True, eq=False)
class Alignment:
    """sorted_P int32 places, block_slot_B int32, blocks_1 int32, counts_S int32 assignments of each slot.

    Sizes P = B * block_m are those of the worst case, known on the host; entries from blocks_1 on are undefined.
    """

    sorted_P: Tensor
    block_slot_B: Tensor
    blocks_1: Tensor
    counts_S: Tensor
    block_m: int
    assignments: int

    @property
    def most_blocks(self) -> int:
        return len(self.block_slot_B)


@triton.jit
def align_kernel(
    slot,
    table,
    sorted_places,
    block_slot,
    blocks,
    counts,
    assignments,
    span,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    p = tl.program_id(0)
    seen, total = before_and_total(slot, table, assignments, span, TILE, BINS, ROWS, COUNTED)
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    first = tl.cumsum(padded, axis=0) - padded
    bin_ = tl.arange(0, BINS)
    if p == 0:
        tl.store(blocks, tl.sum(padded, axis=0) // BLOCK_M)
        tl.store(counts + bin_, total, mask=bin_ < S)
    s = p
    while s < S:  # the blocks and the padding of slot s
        own = bin_ == s
        count = tl.sum(tl.where(own, total, 0), axis=0)
        start = tl.sum(tl.where(own, first, 0), axis=0)
        done = 0
        while done < count:
            place = done + tl.arange(0, BLOCK_M)
            tl.store(sorted_places + start + place, tl.zeros_like(place) + assignments, mask=place >= count)
            tl.store(block_slot + (start + done) // BLOCK_M, s)
            done += BLOCK_M
        s += tl.num_programs(0)
    at = p * span
    end = tl.minimum(at + span, assignments)
    while at < end:
        hot, key = one_hot(slot, at, end, TILE, BINS)
        earlier = tl.cumsum(hot, axis=0) - hot + (seen + first)[None, :]
        place = tl.sum(hot * earlier, axis=1)
        a = at + tl.arange(0, TILE)
        tl.store(sorted_places + place, a, mask=(key >= 0) & (key < BINS))
        seen += tl.sum(hot, axis=0)
        at += TILE


def most_blocks(assignments: int, slots: int, block_m: int) -> int:
    """No list of slots can need more: full blocks, and one that is not full for every slot with an assignment."""
    present = min(assignments, slots)
    return present + (assignments - present) // block_m


def moe_align(slot_A: Tensor, slots: int, block_m: int, most_programs: int = MAX_PROGRAMS) -> Alignment:
    """Alignment of slot_A (integers, -1..slots-1) to blocks of block_m places (a power of two), on its device."""
    assignments, device = len(slot_A), slot_A.device
    bins = max(triton.next_power_of_2(slots), 2)
    programs, span, tile = spans(assignments, bins, most_programs)
    counted = programs > ONE_LAUNCH_TILES
    table = slot_A
    if counted:
        table = torch.empty(programs, bins, dtype=torch.int32, device=device)
        count_kernel[(programs,)](slot_A, table, assignments, span, TILE=tile, BINS=bins, num_warps=8)
    blocks = max(most_blocks(assignments, slots, block_m), 1)
    sorted_P, block_slot_B, blocks_1, counts_S = (
        torch.empty(n, dtype=torch.int32, device=device) for n in (blocks * block_m, blocks, 1, slots)
    )
    align_kernel[(programs,)](
        slot_A,
        table,
        sorted_P,
        block_slot_B,
        blocks_1,
        counts_S,
        assignments,
        span,
        S=slots,
        BLOCK_M=block_m,
        TILE=tile,
        BINS=bins,
        ROWS=triton.next_power_of_2(programs),
        COUNTED=counted,
        num_warps=8,
    )
    return Alignment(sorted_P, block_slot_B, blocks_1, counts_S, block_m, assignments)
