"""Replica routers: which slot of an expert serves an assignment, when the expert has several.

Both take the replica on the token's home rank where there is one: it costs no transfer. They differ in the rest.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .placement.base import Placement

TILE = 256  # tokens


class Local:
    """Home rank's replica, else a replica by a hash of (token row in the batch, expert): stateless and even."""

    def slots(
        self, experts_Tk: NDArray[np.integer], homes_T: NDArray[np.integer], placement: Placement, layer: int
    ) -> NDArray[np.int32]:
        """slots_Tk; homes_T is -1 where a token has no home (tp_replicated)."""
        homes_TL = np.ascontiguousarray(homes_T, dtype=np.int64)[:, None]
        experts_TLk = np.ascontiguousarray(experts_Tk, dtype=np.int16)[:, None]
        tables = placement.logical_to_physical_LEX[layer : layer + 1], placement.replicas_LE[layer : layer + 1]
        return local_slots(experts_TLk, np.arange(len(homes_T)), homes_TL, *tables, placement.slots_per_rank)[:, 0]

    def slots_of_layers(
        self,
        experts_NLk: NDArray[np.integer],
        rows_T: NDArray[np.integer],
        homes_TL: NDArray[np.integer],
        placement: Placement,
    ) -> NDArray[np.int32]:
        """slots_TLk of all layers at once, for rows rows_T of a trace: what `slots` says, layer by layer."""
        tables = placement.logical_to_physical_LEX, placement.replicas_LE
        return local_slots(experts_NLk, rows_T, homes_TL, *tables, placement.slots_per_rank)


class LeastLoaded:
    """Home rank's replica, else the replica on the rank with the fewest rows in this batch so far.

    Rows that leave no choice (one replica, or one at home) are counted first; the others follow in batch order, ties
    to the lower slot.
    """

    def slots(
        self, experts_Tk: NDArray[np.integer], homes_T: NDArray[np.integer], placement: Placement, layer: int
    ) -> NDArray[np.int32]:
        """slots_Tk; homes_T is -1 where a token has no home (tp_replicated)."""
        table_EX = placement.logical_to_physical_LEX[layer]
        return least_loaded_slots(experts_Tk, homes_T, table_EX, placement.slots_per_rank, placement.ep_size)


@numba.njit(cache=True)
def _at_home(slots_X, home, slots_per_rank):  # type: ignore[no-untyped-def]
    """(slot on the home rank or -1, number of replicas)."""
    copies, found = 0, -1
    for x in range(len(slots_X)):
        if slots_X[x] < 0:
            break
        copies += 1
        if found < 0 and slots_X[x] // slots_per_rank == home:
            found = slots_X[x]
    return found, copies


@numba.njit(cache=True)
def local_slots(experts_NLk, rows_T, homes_TL, table_LEX, replicas_LE, slots_per_rank):  # type: ignore[no-untyped-def]
    tokens, (layers, k) = len(rows_T), experts_NLk.shape[1:]
    slots = np.empty((tokens, layers, k), dtype=np.int32)
    for step in range(
        (tokens + TILE - 1) // TILE * layers
    ):  # a tile of tokens in one layer: its table stays in the cache
        layer, begin = step % layers, step // layers * TILE
        for t in range(begin, min(begin + TILE, tokens)):
            first = homes_TL[t, layer] * slots_per_rank  # of the home rank; negative where there is no home
            for j in range(k):
                e = np.uint64(experts_NLk[rows_T[t], layer, j])
                copies = np.uint32(replicas_LE[layer, e])
                slot = table_LEX[layer, e, 0]
                if copies > 1:
                    # Knuth's multiplicative hash; the expert takes part so that its neighbours do not move alike
                    mixed = np.uint32((np.uint64(t * 31) + e) * np.uint64(2654435761))
                    slot = table_LEX[layer, e, (mixed >> np.uint32(16)) % copies]
                    for x in range(copies):
                        held = table_LEX[layer, e, x]
                        if first <= held < first + slots_per_rank:
                            slot = held
                            break
                slots[t, layer, j] = slot
    return slots


@numba.njit(cache=True)
def least_loaded_slots(experts_Tk, homes_T, table_EX, slots_per_rank, ranks):  # type: ignore[no-untyped-def]
    tokens, k = experts_Tk.shape
    slots = np.full((tokens, k), -1, dtype=np.int32)
    rows_G = np.zeros(ranks, dtype=np.int64)
    for t in range(tokens):
        for j in range(k):
            slot, copies = _at_home(table_EX[experts_Tk[t, j]], homes_T[t], slots_per_rank)
            if slot < 0 and copies == 1:
                slot = table_EX[experts_Tk[t, j], 0]
            if slot >= 0:
                slots[t, j] = slot
                rows_G[slot // slots_per_rank] += 1
    for t in range(tokens):
        for j in range(k):
            if slots[t, j] >= 0:
                continue
            best = -1
            for slot in table_EX[experts_Tk[t, j]]:
                if slot < 0:
                    break
                if best < 0 or rows_G[slot // slots_per_rank] < rows_G[best // slots_per_rank]:
                    best = slot
            slots[t, j] = best
            rows_G[best // slots_per_rank] += 1
    return slots
