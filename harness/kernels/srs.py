"""SRS kernel: reduce-scatter of partial sums, pulled row by row in the order of the rank's tokens.

    out[i] = sum over r of X_r[perm[starts[rank] + i]]  (+ residual[the same token])      i < counts[rank]
    normed[i] = out[i] * rsqrt(mean(out[i] ** 2) + eps) * norm_weight                     where NORM

X_r [T, H] of rank r is found through `x_table`, int64 addresses [W]. Every element is read once from each peer and
written once, ROWS rows of every peer in a step; sums are fp32 and in rank order, so the result does not depend on the
rank that computes it. Any counts are exact, also 0 and T; rows of `out` from counts[rank] on are not touched.
pulled[block, r]: rows that a block read from rank r.

The row that is normalised is `out[i]` as stored, so that fused and separate RMSNorm see the same values: what follows
attention (residual, norm, gate) costs one more row written and none read.

Worked example, W = 2, T = 3, perm [1, 0, 2], starts [0, 1], counts [1, 2], rank 1: out[0] = X_0[0] + X_1[0],
out[1] = X_0[2] + X_1[2].

Memory ordering: with SYNC the entry barrier (`barrier.py`) makes every peer's X complete before it is read, and no exit
barrier is needed while SRS and SAG, or two SRS with different X, alternate on one stream. EXIT adds one, after which X
may be overwritten at once. Without SYNC the caller has made X visible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .barrier import arrive_and_wait
from .peers import peer_base


@triton.jit
def srs_kernel(
    x_table,
    perm,
    starts,
    counts,
    residual,
    norm_weight,
    out,
    normed,
    pulled,
    pad_table,
    epochs,
    status,
    rank,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    SYNC: tl.constexpr,
    EXIT: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
):
    block = tl.program_id(0)
    epoch = 0
    if SYNC:
        epoch = tl.load(epochs + block) + 1
        seen = arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT)
        if seen < epoch:
            tl.store(status, 1)
    count = tl.load(counts + rank)
    start = tl.load(starts + rank)
    col = tl.arange(0, BLOCK_H)[None, :]
    rows = 0
    first = block * ROWS
    while first < count:
        i = first + tl.arange(0, ROWS)
        there = i < count
        inside = there[:, None] & (col < H)
        token = tl.load(perm + start + i, mask=there, other=0).to(tl.int64)[:, None]
        total = tl.zeros([ROWS, BLOCK_H], dtype=tl.float32)
        for r in tl.static_range(W):
            x = peer_base(x_table, r, out)
            total += tl.load(x + token * H + col, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            total += tl.load(residual + token * H + col, mask=inside, other=0.0).to(tl.float32)
        row = i.to(tl.int64)[:, None]
        stored = total.to(out.dtype.element_ty)
        tl.store(out + row * H + col, stored, mask=inside)
        if NORM:
            total = stored.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=1) / H + eps)
            weight = tl.load(norm_weight + col, mask=col < H, other=0.0).to(tl.float32)
            tl.store(normed + row * H + col, (total * scale[:, None] * weight).to(out.dtype.element_ty), mask=inside)
        rows += tl.minimum(count - first, ROWS).to(tl.int32)
        first += tl.num_programs(0) * ROWS
    g = tl.arange(0, W_PADDED)
    tl.store(pulled + block * W + g, tl.zeros([W_PADDED], dtype=tl.int32) + rows, mask=g < W)
    if EXIT:
        epoch += 1
        arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT)
    if SYNC:
        tl.store(epochs + block, epoch)
