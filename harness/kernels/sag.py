"""SAG kernel: all-gather of finished rows, pulled from their owners straight into original order.

    out[t] = Z_owner[t][slot[t]]      t < T, the same on every rank
    ids_out[t] = IDS_owner[t][slot[t]]                                where IDS > 0

Z_r [>= counts[r], C] of rank r is found through `z_table`, int64 addresses [W]. One read and one write an element; a step
reads ROWS rows at once, from whichever ranks, so that one wait for the link serves all of them. IDS int16 expert ids of
each token travel beside its row, in the same launch behind the same barrier, for the prediction of the next layer.
pulled[block, r]: rows that a block read from rank r.

Worked example, W = 2, T = 3, owner [1, 0, 1], slot [0, 0, 1]: out = [Z_1[0], Z_0[0], Z_1[1]].

Memory ordering: as for SRS. The entry barrier makes every peer's Z complete; a peer's arrival at the next SRS barrier
proves that it has read its rows, so Z may be written again after that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .barrier import arrive_and_wait
from .peers import by_peer, peer_rows


@triton.jit
def sag_kernel(
    z_table,
    owner,
    slot,
    out,
    ids_table,
    ids_out,
    pulled,
    pad_table,
    epochs,
    status,
    rank,
    tokens,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
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
    col = tl.arange(0, BLOCK_C)[None, :]
    j = tl.arange(0, IDS_PADDED)[None, :]
    hits = tl.zeros([ROWS, W_PADDED], dtype=tl.int32)
    first = block * ROWS
    while first < tokens:
        t = first + tl.arange(0, ROWS)
        there = t < tokens
        from_rank = tl.load(owner + t, mask=there, other=0).to(tl.int32)
        row = tl.load(slot + t, mask=there, other=0).to(tl.int64)[:, None]
        inside = there[:, None] & (col < C)
        values = tl.load(peer_rows(z_table, from_rank, out) + row * C + col, mask=inside)
        tl.store(out + t.to(tl.int64)[:, None] * C + col, values, mask=inside)
        if IDS > 0:
            ids = tl.load(ids_table + from_rank).to(tl.pointer_type(ids_out.dtype.element_ty))[:, None]
            carried = there[:, None] & (j < IDS)
            tl.store(ids_out + t[:, None] * IDS + j, tl.load(ids + row * IDS + j, mask=carried), mask=carried)
        hits += by_peer(from_rank, there, W_PADDED)
        first += tl.num_programs(0) * ROWS
    g = tl.arange(0, W_PADDED)
    tl.store(pulled + block * W + g, tl.sum(hits, axis=0), mask=g < W)
    if EXIT:
        epoch += 1
        arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT)
    if SYNC:
        tl.store(epochs + block, epoch)
