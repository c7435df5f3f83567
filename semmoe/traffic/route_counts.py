"""Counting routes: from the experts (or slots) and homes of tokens to the numbers that Traffic holds, in one pass.

Routes are rows of a trace, read where they lie: token t is row rows_T[t] of routes_NLk, and the id that it holds there, of
an expert or of a slot, is served by rank rank_LX[layer, id]. Several steps are counted at once as one of steps * L layers:
token t belongs to step step_T[t].
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from .wiring import Int

OCTET = 8  # ranks whose counts of one token fit into the bytes of a word,
MOST_CHOICES = 128  # where it chooses no more experts than this


class Counts(NamedTuple):
    """See Traffic; L is steps * layers."""

    homes_LG: Int
    assignment_pairs_LGG: Int
    rank_pairs_LGG: Int
    expert_rows_LG: Int
    active_experts_LG: Int


def count_pairs(
    routes_NLk: NDArray[np.integer],
    rows_T: NDArray[np.integer],
    rank_LX: NDArray[np.integer],
    homes_TH: NDArray[np.integer],
    ep_size: int,
    step_T: NDArray[np.int64] | None = None,
    steps: int = 1,
) -> Counts:
    """homes_TH: home of each token, [T, L], or [T, 1] where it is the same in all layers. step_T None: one step."""
    homes = np.ascontiguousarray(homes_TH, dtype=np.int64)
    ranks = np.ascontiguousarray(rank_LX, dtype=np.uint16)
    rows = np.ascontiguousarray(rows_T, dtype=np.int64)
    step_T = np.zeros(len(rows), dtype=np.int64) if step_T is None else step_T
    return Counts(*_count(routes_NLk, rows, ranks, homes, step_T, ep_size, steps))


def rank_of_slots(layers: int, num_slots: int, ep_size: int) -> NDArray[np.uint16]:
    """rank_LX where the ids are slots."""
    return np.tile((np.arange(num_slots) // (num_slots // ep_size)).astype(np.uint16), (layers, 1))


@numba.njit(cache=True)
def _count(routes_NLk, rows_T, rank_LX, homes_TH, step_T, ep_size, steps):  # type: ignore[no-untyped-def]
    layers, k = routes_NLk.shape[1:]
    pairs = np.zeros((steps * layers, ep_size, ep_size), dtype=np.int32)
    distinct = np.zeros((steps * layers, ep_size, ep_size), dtype=np.int32)
    used = np.zeros((steps * layers, rank_LX.shape[1]), dtype=np.uint8)
    if ep_size <= OCTET and k <= MOST_CHOICES:
        _count_octet(routes_NLk, rows_T, rank_LX, homes_TH, step_T, pairs, distinct, used)
    else:
        _count_many(routes_NLk, rows_T, rank_LX, homes_TH, step_T, pairs, distinct, used)
    sent, received, local, _, _ = pair_sums(pairs)
    homes = np.zeros((steps * layers, ep_size), dtype=np.int64)
    rows, active = np.zeros_like(homes), np.zeros_like(homes)
    for i in range(steps * layers):
        for g in range(ep_size):
            rows[i, g] = received[i, g] + local[i, g]
            assigned = sent[i, g] + local[i, g]
            if assigned:
                homes[i, g] = assigned // k  # every token has k assignments
        for x in range(used.shape[1]):
            active[i, rank_LX[i % layers, x]] += used[i, x]
    return homes, pairs, distinct, rows, active


@numba.njit(cache=True)
def _count_octet(routes_NLk, rows_T, rank_LX, homes_TH, step_T, pairs, distinct, used):  # type: ignore[no-untyped-def]
    """Up to eight ranks: byte d of a word counts a token's assignments to rank d, 16-bit lanes add them up.

    Worked example, experts on ranks 2, 0, 2: total = 0x020001; adding 0x7F to each byte carries where it is not 0 into the
    highest bit, so once = 0x010001. Even bytes go into lanes 0 and 1 of the first word (ranks 0 and 2), odd ones into the
    second word (ranks 1 and 3). Lanes are emptied before they can overflow; those of one home lie together in the cache.
    """
    layers, k = routes_NLk.shape[1:]
    steps_layers, ranks = pairs.shape[:2]
    bytes_02, ones = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0101010101010101)
    one, seven, eight, lane = np.uint64(1), np.uint64(7), np.uint64(8), np.uint64(0xFFFF)
    word_LX = np.empty(rank_LX.shape, dtype=np.uint64)
    for layer in range(layers):
        for x in range(rank_LX.shape[1]):
            word_LX[layer, x] = one << (eight * np.uint64(rank_LX[layer, x]))
    lanes = np.zeros((ranks, steps_layers, 4), dtype=np.uint64)
    block = 0xFFFF // k
    for begin in range(0, len(rows_T), block):
        for t in range(begin, min(begin + block, len(rows_T))):
            row, first = rows_T[t], step_T[t] * layers
            for layer in range(layers):
                home = np.uint64(homes_TH[t, layer if homes_TH.shape[1] > 1 else 0])
                at = np.uint64(first + layer)  # unsigned: no test for a negative index
                total = np.uint64(0)
                if k % 2:
                    e = np.uint64(routes_NLk[row, layer, 0])
                    total += word_LX[layer, e]
                    used[at, e] = 1
                for j in range(k % 2, k, 2):  # two at once: a tenth faster
                    e, f = np.uint64(routes_NLk[row, layer, j]), np.uint64(routes_NLk[row, layer, j + 1])
                    total += word_LX[layer, e] + word_LX[layer, f]
                    used[at, e] = used[at, f] = 1
                once = ((total + np.uint64(0x7F) * ones) >> seven) & ones
                lanes[home, at, 0] += total & bytes_02
                lanes[home, at, 1] += (total >> eight) & bytes_02
                lanes[home, at, 2] += once & bytes_02
                lanes[home, at, 3] += (once >> eight) & bytes_02
        for s in range(ranks):
            for i in range(steps_layers):
                if not lanes[s, i, 2] | lanes[s, i, 3]:  # no token is at home there
                    continue
                for d in range(ranks):
                    shift = np.uint64(16 * (d // 2))
                    pairs[i, s, d] += np.int32((lanes[s, i, d % 2] >> shift) & lane)
                    distinct[i, s, d] += np.int32((lanes[s, i, 2 + d % 2] >> shift) & lane)
                lanes[s, i] = 0


@numba.njit(cache=True)
def _count_many(routes_NLk, rows_T, rank_LX, homes_TH, step_T, pairs, distinct, used):  # type: ignore[no-untyped-def]
    """Any number of ranks: a rank is new to a token where its stamp is another token's."""
    layers, k = routes_NLk.shape[1:]
    seen, stamp = np.zeros(pairs.shape[1], dtype=np.int64), 0
    for t in range(len(rows_T)):
        row, first = rows_T[t], step_T[t] * layers
        for layer in range(layers):
            home = np.uint64(homes_TH[t, layer if homes_TH.shape[1] > 1 else 0])
            i = np.uint64(first + layer)
            stamp += 1
            for j in range(k):
                x = np.uint64(routes_NLk[row, layer, j])
                rank = np.uint64(rank_LX[layer, x])
                used[i, x] = 1
                pairs[i, home, rank] += 1
                distinct[i, home, rank] += np.int32(seen[rank] != stamp)
                seen[rank] = stamp


@numba.njit(cache=True)
def pair_sums(pairs_LGG):  # type: ignore[no-untyped-def]
    """(sent_LG, received_LG, local_LG, largest_L, remote_L): of the rows between different ranks the sums by rank, the
    largest and all together; and the diagonal."""
    layers, ranks, _ = pairs_LGG.shape
    sent = np.zeros((layers, ranks), dtype=pairs_LGG.dtype)
    received, local = np.zeros_like(sent), np.zeros_like(sent)
    largest, remote = np.zeros(layers, dtype=pairs_LGG.dtype), np.zeros(layers, dtype=pairs_LGG.dtype)
    for layer in range(layers):
        none = most = largest[layer]
        for s in range(ranks):
            out = none
            for d in range(ranks):
                rows = pairs_LGG[layer, s, d] if s != d else none
                out += rows
                received[layer, d] += rows
                most = max(most, rows)
            sent[layer, s], local[layer, s] = out, pairs_LGG[layer, s, s]
            remote[layer] += out
        largest[layer] = most
    return sent, received, local, largest, remote


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
