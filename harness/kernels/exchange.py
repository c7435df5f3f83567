"""Dispatch and combine as pulls: kernels. `launch_exchange.py` says how they fit together.

    pull      out[p] = X_owner[t][slot[t]]            t = list[p] // CHOICES, p < limit, list[p] < entries
    combine   out[p] = sum over j of weight[t, j] * O_g[t * k + j]       g = rank of slots[t, j]     assignments
              out[p] = sum over g of O_g[t], g any rank that serves t    ascending                    de-duplicated

Combine runs over t = list[start + p], p < limit. OWN_ONLY sums the choices that this rank serves itself, from its own table
entry: the partial sum that de-duplicated answers are made of, written to out[t], where the token's home finds it.
Answers lie at the number of their assignment (or token) of the whole group, so nobody has to be told places.

pulled[block, r]: rows that a block read from rank r.

Worked example, 2 ranks, k = 2, slots of rank 0 are 0..1, token 5 with slots [3, 0] and weights [.25, .75]:
combine reads O_1[10] and O_0[11] and gives .25 O_1[10] + .75 O_0[11].

Memory ordering: as for SRS. The entry barrier of `pull` makes the peers' rows complete, that of `combine` their answers;
X and O are different buffers, so arriving at combine proves that a rank has read all its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .barrier import arrive_and_wait
from .peers import by_peer, peer_base, peer_rows


@triton.jit
def pull_kernel(
    x_table,
    entries_list,
    limit_1,
    owner,
    slot,
    out,
    pulled,
    pad_table,
    epochs,
    status,
    rank,
    entries,
    LIMIT_TIMES: tl.constexpr,
    CHOICES: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    SYNC: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
):
    block = tl.program_id(0)
    epoch = 0
    if SYNC:
        epoch = tl.load(epochs + block) + 1
        if arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT) < epoch:
            tl.store(status, 1)
    col = tl.arange(0, BLOCK_H)[None, :]
    limit = tl.load(limit_1).to(tl.int32) * LIMIT_TIMES
    hits = tl.zeros([ROWS, W_PADDED], dtype=tl.int32)
    first = block * ROWS
    while first < limit:
        p = first + tl.arange(0, ROWS)
        entry = tl.load(entries_list + p, mask=p < limit, other=entries).to(tl.int32)
        real = entry < entries  # else padding of a block: its row stays as it is
        token = entry // CHOICES
        peer = tl.load(owner + token, mask=real, other=0).to(tl.int32)
        row = tl.load(slot + token, mask=real, other=0).to(tl.int64)[:, None]
        inside = real[:, None] & (col < H)
        values = tl.load(peer_rows(x_table, peer, out) + row * H + col, mask=inside)
        tl.store(out + p.to(tl.int64)[:, None] * H + col, values, mask=inside)
        hits += by_peer(peer, real, W_PADDED)
        first += tl.num_programs(0) * ROWS
    g = tl.arange(0, W_PADDED)
    tl.store(pulled + block * W + g, tl.sum(hits, axis=0), mask=g < W)
    if SYNC:
        tl.store(epochs + block, epoch)


@triton.jit
def combine_kernel(
    o_table,
    tokens_list,
    start_1,
    limit_1,
    slots,
    weights,
    out,
    pulled,
    pad_table,
    epochs,
    status,
    rank,
    SLOTS_PER_RANK: tl.constexpr,
    K: tl.constexpr,
    DEDUP: tl.constexpr,
    OWN_ONLY: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    SYNC: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
):
    block = tl.program_id(0)
    epoch = 0
    if SYNC:
        epoch = tl.load(epochs + block) + 1
        if arrive_and_wait(pad_table, rank, block, epoch, W, W_PADDED, SPIN_LIMIT) < epoch:
            tl.store(status, 1)
    col = tl.arange(0, BLOCK_H)
    inside = col < H
    first = tl.load(start_1)
    limit = tl.load(limit_1).to(tl.int32)
    peers = tl.arange(0, W_PADDED)
    hits = tl.zeros([W_PADDED], dtype=tl.int32)
    p = block
    while p < limit:
        token = tl.load(tokens_list + first + p).to(tl.int64)
        total = tl.zeros([BLOCK_H], dtype=tl.float32)
        if DEDUP:
            serving = tl.zeros([], dtype=tl.int64)  # bit g: rank g serves one of the choices
            for j in tl.static_range(K):
                serving |= tl.full([], 1, tl.int64) << (tl.load(slots + token * K + j) // SLOTS_PER_RANK)
            for g in tl.static_range(W):
                serves = ((serving >> g) & 1) > 0
                o = peer_base(o_table, g, out)
                total += tl.load(o + token * H + col, mask=inside & serves, other=0.0).to(tl.float32)
            hits += ((serving >> peers) & 1).to(tl.int32)
        else:
            for j in tl.static_range(K):
                peer = tl.load(slots + token * K + j) // SLOTS_PER_RANK
                wanted = (peer == rank) | (not OWN_ONLY)
                o = peer_base(o_table, peer, out)
                row = tl.load(o + (token * K + j) * H + col, mask=inside & wanted, other=0.0).to(tl.float32)
                total += tl.load(weights + token * K + j) * row
                hits += ((peers == peer) & wanted).to(tl.int32)
        at = token if OWN_ONLY else p.to(tl.int64)
        tl.store(out + at * H + col, total.to(out.dtype.element_ty), mask=inside)
        p += tl.num_programs(0)
    tl.store(pulled + block * W + peers, hits, mask=peers < W)
    if SYNC:
        tl.store(epochs + block, epoch)
