"""Cross-rank barrier inside a kernel: block b of every rank waits for block b of all ranks.

    block barrier
    pad of rank r [b, my rank] := epoch          for all r, release, system scope
    repeat m = min over r of my pad [b, r]       acquire, system scope, until m >= epoch
    block barrier

Pads are int32 [blocks, W] on every rank. Epochs only grow, so nothing is ever reset: a captured graph can be replayed,
and an aborted launch leaves no flag behind. Worked example, W = 2, epoch 5: rank 0 writes 5 into [b, 0] of both pads and
waits until its own pad reads [5, >= 5].

Memory ordering: the block barrier puts all earlier writes of the block before the release; another kernel's writes on
the same rank came earlier in stream order. A rank that acquires the epoch sees them all.

Rules: the same grid on all ranks, co-resident, from configuration and never from token counts; every block arrives, also
with nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive_and_wait(pad_table, rank, block, epoch, W: tl.constexpr, W_PADDED: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Returns the smallest epoch seen: below `epoch` only when SPIN_LIMIT > 0 polls were not enough."""
    tl.debug_barrier()
    peer = tl.arange(0, W_PADDED)
    there = peer < W
    own_base = tl.load(pad_table + rank)
    base = tl.load(pad_table + peer, mask=there, other=own_base)
    theirs = base.to(tl.pointer_type(tl.int32)) + block * W + rank
    value = tl.zeros([W_PADDED], dtype=tl.int32) + epoch
    tl.atomic_xchg(theirs, value, mask=there, sem="release", scope="sys")
    mine = own_base.to(tl.pointer_type(tl.int32)) + block * W + peer
    nothing = tl.zeros([W_PADDED], dtype=tl.int32)
    seen = tl.min(tl.where(there, tl.atomic_add(mine, nothing, mask=there, sem="acquire", scope="sys"), epoch))
    spins = 0
    while (seen < epoch) & ((SPIN_LIMIT == 0) | (spins < SPIN_LIMIT)):
        seen = tl.min(tl.where(there, tl.atomic_add(mine, nothing, mask=there, sem="acquire", scope="sys"), epoch))
        spins += 1
    tl.debug_barrier()
    return seen


@triton.jit
def barrier_kernel(pad_table, epochs, status, rank, W: tl.constexpr, W_PADDED: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """The barrier alone. It shares pads and epochs with the kernels that wait themselves, so every block takes part."""
    block = tl.program_id(0)
    epoch = tl.load(epochs + block) + 1
    if arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT) < epoch:
        tl.store(status, 1)
    tl.store(epochs + block, epoch)
