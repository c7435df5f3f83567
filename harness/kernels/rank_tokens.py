"""Token ranking: the shuffle plan of a home per token, by a stable counting sort in one or two launches.

    counts[g] = tokens with owner g            starts = exclusive sum of counts
    slot[t]   = tokens before t with the same owner
    perm[starts[owner[t]] + slot[t]] = t

Worked example, 4 tokens on 2 ranks, owner [1, 0, 1, 0]: counts [2, 2], starts [0, 2], slot [0, 0, 1, 1], perm
[1, 3, 0, 2]. Equal to argsort(stable), bincount, cumsum and the inverse permutation of torch.

Memory ordering: none between programs of a launch; the second launch reads the counts of the first in stream order.
Everything stays on the device, so that a layer can be planned inside a captured graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.ranking import TokenRanking
from .counting import MAX_PROGRAMS, ONE_LAUNCH_TILES, TILE_ELEMENTS, before_and_total, count_kernel, one_hot


@triton.jit
def rank_kernel(
    owner,
    table,
    perm,
    slot,
    counts,
    starts,
    tokens,
    span,
    W: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    p = tl.program_id(0)
    seen, total = before_and_total(owner, table, tokens, span, TILE, BINS, ROWS, COUNTED)
    first = tl.cumsum(total, axis=0) - total
    if p == 0:
        g = tl.arange(0, BINS)
        tl.store(counts + g, total.to(tl.int64), mask=g < W)
        tl.store(starts + g, first.to(tl.int64), mask=g < W)
    at = p * span
    end = tl.minimum(at + span, tokens)
    while at < end:
        hot, _ = one_hot(owner, at, end, TILE, BINS)
        earlier = tl.cumsum(hot, axis=0) - hot + seen[None, :]
        t = at + tl.arange(0, TILE)
        mine = tl.sum(hot * earlier, axis=1)
        place = mine + tl.sum(hot * first[None, :], axis=1)
        tl.store(slot + t, mine.to(tl.int64), mask=t < end)
        tl.store(perm + place, t.to(tl.int64), mask=t < end)
        seen += tl.sum(hot, axis=0)
        at += TILE


def spans(tokens: int, bins: int, most: int = MAX_PROGRAMS) -> tuple[int, int, int]:
    """(programs, keys of a program, keys of a tile): counting sort of `tokens` keys, `bins` padded bins, at most `most`
    programs."""
    tile = max(min(TILE_ELEMENTS // bins, triton.next_power_of_2(max(tokens, 1))), 16)
    tiles = max(triton.cdiv(tokens, tile), 1)
    span = triton.cdiv(tiles, most) * tile
    return max(triton.cdiv(tokens, span), 1), span, tile


def rank_tokens(owner_T: Tensor, ranks: int, most_programs: int = MAX_PROGRAMS) -> TokenRanking:
    """The ranking of owner_T (integers in 0..ranks-1), on its device, without a host round trip.

    One launch up to 8 tiles (4,096 tokens on 8 ranks), else two.
    """
    tokens, device = len(owner_T), owner_T.device
    bins = max(triton.next_power_of_2(ranks), 2)
    programs, span, tile = spans(tokens, bins, most_programs)
    counted = programs > ONE_LAUNCH_TILES
    perm_T, slot_T = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(2))
    counts_G, starts_G = (torch.empty(ranks, dtype=torch.int64, device=device) for _ in range(2))
    table = owner_T
    if counted:
        table = torch.empty(programs, bins, dtype=torch.int32, device=device)
        count_kernel[(programs,)](owner_T, table, tokens, span, TILE=tile, BINS=bins, num_warps=8)
    rank_kernel[(programs,)](
        owner_T,
        table,
        perm_T,
        slot_T,
        counts_G,
        starts_G,
        tokens,
        span,
        W=ranks,
        TILE=tile,
        BINS=bins,
        ROWS=triton.next_power_of_2(programs),
        COUNTED=counted,
        num_warps=8,
    )
    return TokenRanking(perm_T, slot_T, owner_T, counts_G, starts_G)
