"""Replica routers: which slot of an expert serves an assignment, when the expert has several.

Both take the replica on the token's home rank where there is one: it costs no transfer. They differ in the rest.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .placement.base import Placement


class Local:
    """Home rank's replica, else a replica by a hash of (token row in the batch, expert): stateless and even."""

    def slots(
        self, experts_Tk: NDArray[np.integer], homes_T: NDArray[np.integer], placement: Placement, layer: int
    ) -> NDArray[np.int32]:
        """slots_Tk; homes_T is -1 where a token has no home (tp_replicated)."""
        return local_slots(experts_Tk, homes_T, placement.logical_to_physical_LEX[layer], placement.slots_per_rank)


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
def local_slots(experts_Tk, homes_T, table_EX, slots_per_rank):  # type: ignore[no-untyped-def]
    tokens, k = experts_Tk.shape
    slots = np.empty((tokens, k), dtype=np.int32)
    for t in range(tokens):
        for j in range(k):
            e = experts_Tk[t, j]
            slot, copies = _at_home(table_EX[e], homes_T[t], slots_per_rank)
            if slot < 0:  # Knuth's multiplicative hash; the expert takes part so that its neighbours do not move alike
                mixed = ((t * 31 + e) * 2654435761) & 0xFFFFFFFF
                slot = table_EX[e, (mixed >> 16) % copies]
            slots[t, j] = slot
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
