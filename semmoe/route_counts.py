"""Counting routes: from the slots and homes of tokens to the numbers that Traffic holds, in one pass over the tokens."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .wiring import Int


@numba.njit(cache=True)
def count_pairs_numba(slots_TLk, homes_TL, num_slots, ep_size):  # type: ignore[no-untyped-def]
    """(homes_LG, assignment_pairs_LGG, rank_pairs_LGG, active_experts_LG); see count_pairs_numpy for the definition."""
    tokens, layers, k = slots_TLk.shape
    per_rank = num_slots // ep_size
    rank_of = np.empty(num_slots, dtype=np.uint16)
    for p in range(num_slots):
        rank_of[p] = p // per_rank
    homes = np.zeros((layers, ep_size), dtype=np.int64)
    hits = np.zeros((layers, ep_size, num_slots), dtype=np.int32)  # by home and slot; folded to ranks at the end
    distinct = np.zeros((layers, ep_size, ep_size), dtype=np.int64)
    seen = np.zeros(ep_size, dtype=np.int64)
    stamp = 0
    for t in range(tokens):
        for layer in range(layers):
            home = np.uint64(homes_TL[t, layer])  # unsigned: no test for a negative index in the innermost loop
            homes[layer, home] += 1
            stamp += 1
            for j in range(k):
                slot = np.uint64(slots_TLk[t, layer, j])
                hits[layer, home, slot] += 1
                rank = np.uint64(rank_of[slot])
                distinct[layer, home, rank] += np.int64(seen[rank] != stamp)
                seen[rank] = stamp
    pairs = np.zeros((layers, ep_size, ep_size), dtype=np.int64)
    active = np.zeros((layers, ep_size), dtype=np.int64)
    used = np.zeros(num_slots, dtype=np.int64)
    for layer in range(layers):
        used[:] = 0
        for source in range(ep_size):
            for group in range(ep_size):
                rows = 0
                for p in range(group * per_rank, (group + 1) * per_rank):
                    rows += hits[layer, source, p]
                    used[p] += hits[layer, source, p]
                pairs[layer, source, group] = rows
        for p in range(num_slots):
            active[layer, rank_of[p]] += used[p] > 0
    return homes, pairs, distinct, active


def count_pairs_numpy(
    slots_TLk: NDArray[np.integer], homes_TL: NDArray[np.integer], num_slots: int, ep_size: int
) -> tuple[Int, Int, Int, Int]:
    """The plain reference that the tests hold `count_pairs_numba` to."""
    _, layers, _ = slots_TLk.shape
    rank_TLk = slots_TLk // (num_slots // ep_size)
    serves_TLG = (rank_TLk[..., None] == np.arange(ep_size)).sum(axis=2)
    home_TLG = homes_TL[..., None] == np.arange(ep_size)
    homes = home_TLG.sum(axis=0)
    pairs = np.einsum("tls,tld->lsd", home_TLG.astype(np.int64), serves_TLG)
    distinct = np.einsum("tls,tld->lsd", home_TLG.astype(np.int64), (serves_TLG > 0).astype(np.int64))
    active = np.array(
        [
            [len(np.unique(s[s // (num_slots // ep_size) == g])) for g in range(ep_size)]
            for s in (slots_TLk[:, layer].ravel() for layer in range(layers))
        ],
        dtype=np.int64,
    )
    return homes, pairs, distinct, active


@numba.njit(cache=True)
def count_rows(slots_TLk, num_slots, ep_size):  # type: ignore[no-untyped-def]
    """(expert_rows_LG, active_experts_LG) without homes."""
    tokens, layers, k = slots_TLk.shape
    per_rank = num_slots // ep_size
    hits = np.zeros((layers, num_slots), dtype=np.int64)
    for t in range(tokens):
        for layer in range(layers):
            for j in range(k):
                hits[layer, slots_TLk[t, layer, j]] += 1
    rows = np.zeros((layers, ep_size), dtype=np.int64)
    active = np.zeros((layers, ep_size), dtype=np.int64)
    for layer in range(layers):
        for p in range(num_slots):
            rows[layer, p // per_rank] += hits[layer, p]
            active[layer, p // per_rank] += hits[layer, p] > 0
    return rows, active


@numba.njit(cache=True)
def node_copies(slots_TLk, homes_TL, num_slots, ep_size, ranks_per_node):  # type: ignore[no-untyped-def]
    """copies_LGN[l, s, n]: tokens at home on rank s with an assignment on a rank of node n, which is sent once."""
    tokens, layers, k = slots_TLk.shape
    nodes = (ep_size + ranks_per_node - 1) // ranks_per_node
    slots_per_node = (num_slots // ep_size) * ranks_per_node
    copies = np.zeros((layers, ep_size, nodes), dtype=np.int64)
    seen, stamp = np.zeros(nodes, dtype=np.int64), 0
    for t in range(tokens):
        for layer in range(layers):
            stamp += 1
            for j in range(k):
                node = slots_TLk[t, layer, j] // slots_per_node
                if seen[node] != stamp:
                    seen[node] = stamp
                    copies[layer, homes_TL[t, layer], node] += 1
    return copies
