"""What the counting sorts share: keys of a tile as one-hot rows, and how many came before a program's own part.

`program` p of P works on keys[p * span : (p + 1) * span] in tiles; keys outside 0..bins-1 belong nowhere and are
skipped. Nothing is atomic, so the order is stable and the result the same on every machine.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_ELEMENTS = 4096  # one-hot entries of a tile: 16 a thread with 8 warps; twice as many spill on sm_90
MAX_PROGRAMS = 64
ONE_LAUNCH_TILES = 8  # up to so many tiles every program counts all keys itself: cheaper than a second launch


@triton.jit
def one_hot(keys, start, end, TILE: tl.constexpr, BINS: tl.constexpr):
    """(int32 [TILE, BINS], keys [TILE]) of keys[start : min(start + TILE, end)]."""
    i = start + tl.arange(0, TILE)
    key = tl.load(keys + i, mask=i < end, other=-1).to(tl.int32)
    return (key[:, None] == tl.arange(0, BINS)[None, :]).to(tl.int32), key


@triton.jit
def count_range(keys, start, end, TILE: tl.constexpr, BINS: tl.constexpr):
    """int32 [BINS]: how often each key stands in keys[start : end]."""
    counts = tl.zeros([BINS], dtype=tl.int32)
    at = start
    while at < end:
        hot, _ = one_hot(keys, at, end, TILE, BINS)
        counts += tl.sum(hot, axis=0)
        at += TILE
    return counts


@triton.jit
def count_kernel(keys, table, tokens, span, TILE: tl.constexpr, BINS: tl.constexpr):
    """table[p, b] = how often key b stands in the part of program p. table: int32 [P, BINS]."""
    p = tl.program_id(0)
    start = p * span
    counts = count_range(keys, start, tl.minimum(start + span, tokens), TILE, BINS)
    tl.store(table + p * BINS + tl.arange(0, BINS), counts)


@triton.jit
def before_and_total(
    keys, table, tokens, span, TILE: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr
):
    """(int32 [BINS] keys in the parts before this program's, int32 [BINS] keys in all).

    COUNTED: from the table of `count_kernel`, ROWS >= P rows padded; else by counting here.
    """
    p = tl.program_id(0)
    if COUNTED:
        row = tl.arange(0, ROWS)
        there = row < tl.num_programs(0)
        at = row[:, None] * BINS + tl.arange(0, BINS)[None, :]
        counts = tl.load(table + at, mask=there[:, None], other=0)
        before = tl.sum(tl.where(row[:, None] < p, counts, 0), axis=0)
        total = tl.sum(counts, axis=0)
    else:
        before = count_range(keys, 0, tl.minimum(p * span, tokens), TILE, BINS)
        total = before + count_range(keys, tl.minimum(p * span, tokens), tokens, TILE, BINS)
    return before, total
