"""Home assignment on the device: rank prices, argmax, repair by margin; `semmoe.schedule.priced` is its reference.

One launch; program c works on the c-th chunk of tokens alone, with scores and homes in registers (see the reference for
the rule and the chunks). With `rank_tokens` a layer is planned without a host round trip: scores -> homes -> plan.

    smallest(key, m)   threshold K with |{key < K}| = m, found bit by bit from the top: keys are unique, because the
                       token stands in their low bits, so ties go to the lower token

Worked example, 3 tokens on 2 ranks, capacity 2, scores [[9, 0], [8, 0], [7, 0]]: all ask for rank 0; token 2 has the
least margin and moves: homes [0, 0, 1].

Memory ordering: none, programs share nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.schedule.priced import HALVE_EVERY, ROUNDS, check_priced, chunk_tokens

KEY_BITS = 42  # margin (29 bits) above the token of the chunk (13 bits)


@triton.jit
def smallest(mask, key, wanted, BITS: tl.constexpr):
    """int64 threshold below which `wanted` (or all) of the masked keys lie."""
    threshold = tl.zeros([], dtype=tl.int64)
    bit = tl.zeros([], dtype=tl.int64) + (BITS - 1)
    while bit >= 0:
        trial = threshold + (tl.full([], 1, tl.int64) << bit)
        below = tl.sum((mask & (key < trial)).to(tl.int32), axis=0)
        threshold = tl.where(below <= wanted, trial, threshold)
        bit -= 1
    return threshold


@triton.jit
def best_rank(value, rank, W_PADDED: tl.constexpr):
    """(largest value of each row, the lowest rank that has it)."""
    most = tl.max(value, axis=1)
    return most, tl.min(tl.where(value == most[:, None], rank, W_PADDED), axis=1)


@triton.jit
def home_kernel(
    score,
    owner,
    tokens,
    capacity,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_PADDED: tl.constexpr,
    ROUNDS: tl.constexpr,
    HALVE_EVERY: tl.constexpr,
    BITS: tl.constexpr,
):
    NEVER: tl.constexpr = -(1 << 30)
    start = tl.program_id(0) * CHUNK
    end = tl.minimum(start + CHUNK, tokens)
    number = end - start
    slack = tl.full([], 0, tl.int64) + capacity - (tokens + W - 1) // W  # both are constants where they are 1
    share = slack * end // tokens - slack * start // tokens
    most_here = (number + W - 1) // W + share.to(tl.int32)

    i = tl.arange(0, CHUNK_PADDED)
    g = tl.arange(0, W_PADDED)
    exists, rank = i < number, g[None, :]
    there = exists[:, None] & (rank < W)
    at = (start + i)[:, None].to(tl.int64) * W + rank
    scores = tl.load(score + at, mask=there, other=0)
    low = tl.min(tl.min(tl.where(there, scores, 0x7FFFFFFF), axis=1), axis=0)
    high = tl.max(tl.max(tl.where(there, scores, -0x7FFFFFFF), axis=1), axis=0)
    scores = tl.where(there, scores - low, 0)
    shut = tl.where(g < W, 0, NEVER)  # ranks that only pad the table

    price = tl.zeros([W_PADDED], dtype=tl.int32)
    kept = price
    lowest = tl.full([], 1 << 62, tl.int64)
    step = tl.maximum(2 * (high - low) // number, 1)
    turn = 0
    while turn < ROUNDS:
        most, home = best_rank(scores + (shut - price)[None, :], rank, W_PADDED)
        count = tl.sum(((home[:, None] == rank) & exists[:, None]).to(tl.int32), axis=0)
        dual = tl.sum(tl.where(exists, most, 0).to(tl.int64), axis=0) + tl.sum(price.to(tl.int64), axis=0) * most_here
        better = dual < lowest
        kept, lowest = tl.where(better, price, kept), tl.where(better, dual, lowest)
        price = tl.where(g < W, tl.maximum(price + step * (count - most_here), 0), 0)
        step = tl.where(turn % HALVE_EVERY == HALVE_EVERY - 1, tl.maximum(step // 2, 1), step)
        turn += 1

    value = scores + (shut - kept)[None, :]
    _, home = best_rank(value, rank, W_PADDED)
    count = tl.sum(((home[:, None] == rank) & exists[:, None]).to(tl.int32), axis=0)
    overfull = tl.max(tl.where(g < W, count - most_here, 0), axis=0)
    while overfull > 0:
        source = tl.min(tl.where((count > most_here) & (g < W), g, W_PADDED), axis=0)
        excess = tl.sum(tl.where(g == source, count - most_here, 0), axis=0)
        opened = (count < most_here) & (g < W)
        reachable, target = best_rank(tl.where(opened[None, :], value, NEVER * 2 + 1), rank, W_PADDED)
        own = tl.sum(tl.where(home[:, None] == rank, value, 0), axis=1)
        key = (own - reachable).to(tl.int64) * 8192 + i
        mine = (home == source) & exists
        leaving = mine & (key < smallest(mine, key, excess, BITS))
        h = 0
        while h < W:
            room = tl.sum(tl.where((g == h) & opened, most_here - count, 0), axis=0)
            asking = leaving & (target == h)
            moved = asking
            if tl.sum(asking.to(tl.int32), axis=0) > room:
                moved = asking & (key < smallest(asking, key, room, BITS))
            home = tl.where(moved, h, home)
            number_moved = tl.sum(moved.to(tl.int32), axis=0)
            count += tl.where(g == h, number_moved, 0) - tl.where(g == source, number_moved, 0)
            h += 1
        overfull = tl.max(tl.where(g < W, count - most_here, 0), axis=0)
    tl.store(owner + start + i, home.to(owner.dtype.element_ty), mask=exists)


def home_tokens(score_TG: Tensor, capacity: int) -> Tensor:
    """Home of each token (int64), equal to `semmoe.schedule.priced.priced_owners`. score_TG: int32, contiguous, spanning
    less than 2^24 (not checked here: that would read the device). UserError when the tokens do not fit."""
    tokens, ranks = score_TG.shape
    check_priced(tokens, ranks, capacity)
    owner_T = torch.empty(tokens, dtype=torch.int64, device=score_TG.device)
    grid = (triton.cdiv(tokens, chunk_tokens(ranks)),)
    home_kernel[grid](score_TG, owner_T, tokens, capacity, **constants(ranks, tokens), num_warps=8)
    return owner_T


def constants(ranks: int, tokens: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    chunk = chunk_tokens(ranks)
    return {
        "W": ranks,
        "W_PADDED": max(triton.next_power_of_2(ranks), 2),
        "CHUNK": chunk,
        "CHUNK_PADDED": triton.next_power_of_2(min(chunk, max(tokens, 1))),
        "ROUNDS": ROUNDS,
        "HALVE_EVERY": HALVE_EVERY,
        "BITS": KEY_BITS,
    }
