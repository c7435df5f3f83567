"""Exact capacity-bounded assignment of items (tokens, experts, requests) to ranks.

Maximise sum_t score[t, owner[t]] subject to count_g <= capacity_g. Items differ only in their scores and ranks are few,
so successive shortest paths run on a graph of G nodes: every item starts at its best rank; while a rank holds too
many, the cheapest chain of single moves g -> h -> ... carries one item's worth of excess to a rank with room. The arc
g -> h costs the smallest loss score[t, g] - score[t, h] among the items now at g, read from a heap per arc. Prices keep
reduced costs non-negative, so a chain is one Dijkstra search over G nodes.

Equality across machines: scores are integers and every tie falls to the lower (loss, item), then the lower rank.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .errors import UserError

_ITEM_BITS = 30  # a heap key is loss * 2^30 + item; losses of int32 scores fit in 33 bits
_ITEM_MASK = (1 << _ITEM_BITS) - 1
_FAR = np.int64(1) << 62


def assign_capped(score_TG: NDArray[np.integer], capacity: int | NDArray[np.integer]) -> NDArray[np.int64]:
    """owner_T [T] of the largest summed score with at most `capacity` items a rank (one number, or one per rank [G]).

    Worked example: scores [[9, 1], [8, 7], [5, 0]] with capacity 2: all three like rank 0; item 1 loses least (1) by
    moving, so the owners are [0, 1, 0].

    Raises UserError when the items do not fit, or scores lie outside int32.
    """
    if score_TG.ndim != 2 or score_TG.shape[1] < 1:
        raise UserError(f"scores of shape {score_TG.shape} cannot be assigned; [items, ranks] with ranks >= 1 is right")
    items, ranks = score_TG.shape
    capacity_G = np.broadcast_to(np.asarray(capacity, dtype=np.int64), (ranks,)).copy()
    if capacity_G.min() < 0 or capacity_G.sum() < items:
        raise UserError(
            f"{items} items do not fit on {ranks} ranks of capacity {capacity_G.tolist()}; at least {items} in all, "
            f"{-(-items // ranks)} a rank, is needed"
        )
    if items > _ITEM_MASK:
        raise UserError(f"{items} items to assign at once; at most {_ITEM_MASK} are supported")
    if score_TG.dtype.itemsize > 4 and items:
        low, high = int(score_TG.min()), int(score_TG.max())
        if low < -(2**31) or high >= 2**31:
            raise UserError(f"scores run {low}..{high}, outside int32; scale them down before assigning")
    return capped_owners(np.ascontiguousarray(score_TG, dtype=np.int32), capacity_G)


def assign_equal(score_EG: NDArray[np.integer]) -> NDArray[np.int64]:
    """owner_E of the largest summed score with exactly E / G items a rank (experts to ranks).

    int64 scores wider than int32 are scaled down by a power of two first. Raises UserError when G does not divide E.
    """
    items, ranks = score_EG.shape
    if items % ranks:
        raise UserError(f"{items} items cannot be split evenly over {ranks} ranks")
    return assign_capped(narrowed(score_EG), items // ranks)


def narrowed(score: NDArray[np.integer]) -> NDArray[np.int32]:
    """Integer scores shifted right until they fit int32 (differences below the shift are lost)."""
    largest = max(abs(int(score.max(initial=0))), abs(int(score.min(initial=0))))
    return (score >> max(largest.bit_length() - 31, 0)).astype(np.int32)


@numba.njit(cache=True)
def capped_owners(score_TG, capacity_G):  # type: ignore[no-untyped-def]
    """The kernel of assign_capped; capacity_G.sum() >= T is the caller's promise."""
    items, ranks = score_TG.shape
    owner = np.empty(items, dtype=np.int64)
    count = np.zeros(ranks, dtype=np.int64)
    for t in range(items):
        best = 0
        for g in range(1, ranks):
            if score_TG[t, g] > score_TG[t, best]:
                best = g
        owner[t] = best
        count[best] += 1

    # A heap per arc g -> h, made once g is full: a rank with room ends every chain, so it needs no outgoing arc.
    pool = np.empty(4 * items + 1024, dtype=np.int64)
    used = 0
    start = np.zeros((ranks, ranks), dtype=np.int64)
    room = np.zeros((ranks, ranks), dtype=np.int64)
    size = np.zeros((ranks, ranks), dtype=np.int64)
    opened = np.zeros(ranks, dtype=np.bool_)
    price = np.zeros(ranks, dtype=np.int64)
    dist = np.empty(ranks, dtype=np.int64)
    before = np.empty(ranks, dtype=np.int64)
    settled = np.empty(ranks, dtype=np.bool_)

    for source in range(ranks):
        while count[source] > capacity_G[source]:
            for g in range(ranks):
                if opened[g] or count[g] < capacity_G[g]:
                    continue
                opened[g] = True
                for h in range(ranks):
                    if h == g:
                        continue
                    if used + count[g] + 1 > len(pool):
                        pool = _grown(pool, used + count[g] + 1)
                    start[g, h] = used
                    room[g, h] = count[g] + 1
                    used += count[g] + 1
                    n = 0
                    for t in range(items):
                        if owner[t] == g:
                            loss = np.int64(score_TG[t, g]) - np.int64(score_TG[t, h])
                            pool[start[g, h] + n] = (loss << _ITEM_BITS) + t
                            n += 1
                    size[g, h] = n
                    for i in range(n // 2 - 1, -1, -1):
                        _sift_down(pool, start[g, h], n, i)

            # Dijkstra over reduced costs loss - price_g + price_h >= 0, until the nearest rank with room is settled.
            for g in range(ranks):
                dist[g], before[g], settled[g] = _FAR, -1, False
            dist[source] = 0
            sink = -1
            while True:
                near = -1
                for g in range(ranks):
                    if not settled[g] and dist[g] < _FAR and (near < 0 or dist[g] < dist[near]):
                        near = g
                settled[near] = True
                if count[near] < capacity_G[near]:
                    sink = near
                    break
                for h in range(ranks):
                    if settled[h]:
                        continue
                    while size[near, h] > 0 and owner[pool[start[near, h]] & _ITEM_MASK] != near:
                        size[near, h] = _pop(pool, start[near, h], size[near, h])
                    if size[near, h] == 0:
                        continue
                    cost = dist[near] + (pool[start[near, h]] >> _ITEM_BITS) - price[near] + price[h]
                    if cost < dist[h]:
                        dist[h] = cost
                        before[h] = near
            for g in range(ranks):
                if settled[g]:
                    price[g] += dist[sink] - dist[g]

            # Move one item along each arc of the chain, from its end to the source.
            to = sink
            count[sink] += 1
            count[source] -= 1
            while to != source:
                g = before[to]
                t = pool[start[g, to]] & _ITEM_MASK
                owner[t] = to
                if opened[to]:
                    for h in range(ranks):
                        if h == to:
                            continue
                        if size[to, h] == room[to, h]:
                            more = 2 * room[to, h] + 8
                            if used + more > len(pool):
                                pool = _grown(pool, used + more)
                            for i in range(size[to, h]):
                                pool[used + i] = pool[start[to, h] + i]
                            start[to, h] = used
                            room[to, h] = more
                            used += more
                        loss = np.int64(score_TG[t, to]) - np.int64(score_TG[t, h])
                        pool[start[to, h] + size[to, h]] = (loss << _ITEM_BITS) + t
                        size[to, h] += 1
                        _sift_up(pool, start[to, h], size[to, h] - 1)
                to = g
    return owner


@numba.njit(cache=True)
def _grown(pool, needed):  # type: ignore[no-untyped-def]
    larger = np.empty(max(2 * len(pool), needed), dtype=np.int64)
    larger[: len(pool)] = pool
    return larger


@numba.njit(cache=True)
def _sift_down(pool, start, size, i):  # type: ignore[no-untyped-def]
    key = pool[start + i]
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and pool[start + child + 1] < pool[start + child]:
            child += 1
        if pool[start + child] >= key:
            break
        pool[start + i] = pool[start + child]
        i = child
    pool[start + i] = key


@numba.njit(cache=True)
def _sift_up(pool, start, i):  # type: ignore[no-untyped-def]
    key = pool[start + i]
    while i > 0:
        parent = (i - 1) // 2
        if pool[start + parent] <= key:
            break
        pool[start + i] = pool[start + parent]
        i = parent
    pool[start + i] = key


@numba.njit(cache=True)
def _pop(pool, start, size):  # type: ignore[no-untyped-def]
    size -= 1
    if size > 0:
        pool[start] = pool[start + size]
        _sift_down(pool, start, size, 0)
    return size
