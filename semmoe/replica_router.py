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
    inverse_X, bits_LE = inverses(table_LEX.shape[2]), home_bits(table_LEX, replicas_LE, slots_per_rank)
    for begin in range(0, tokens, TILE):  # a tile of tokens in one layer: its table stays in the cache
        end = min(begin + TILE, tokens)
        for layer in range(layers):
            tables = table_LEX[layer], replicas_LE[layer], bits_LE[layer], inverse_X
            route_tile(experts_NLk, rows_T, homes_TL, layer, begin, *tables, slots_per_rank, slots[begin:end, layer])
    return slots


@numba.njit(cache=True)
def route_tile(
    experts_NLk, rows_T, homes_TH, layer, begin, table_EX, replicas_E, bits_E, inverse_X, slots_per_rank, slots_Tk
):  # type: ignore[no-untyped-def]
    """Slots of tokens begin .. begin + len(slots_Tk) in one layer, into slots_Tk. A negative home is none."""
    for i in range(len(slots_Tk)):
        t = begin + i
        row, home = rows_T[t], homes_TH[t, layer if homes_TH.shape[1] > 1 else 0]
        first, place = np.uint32(home * slots_per_rank), np.uint64(home) & np.uint64(63)
        for j in range(slots_Tk.shape[1]):
            e = np.uint64(experts_NLk[row, layer, j])  # unsigned: no test for a negative index
            copies = np.uint64(replicas_E[e])
            # Knuth's multiplicative hash; the expert takes part so that its neighbours do not move alike
            mixed = np.uint64(np.uint32((np.uint64(t * 31) + e) * np.uint64(2654435761))) >> np.uint64(16)
            slot = table_EX[e, mixed - copies * ((mixed * inverse_X[copies]) >> np.uint64(32))]
            if (bits_E[e] >> place) & np.uint64(1):
                for x in range(copies):
                    if np.uint32(table_EX[e, x]) - first < np.uint32(slots_per_rank):
                        slot = table_EX[e, x]
                        break
            slots_Tk[i, j] = slot


@numba.njit(cache=True)
def home_bits(table_LEX, replicas_LE, slots_per_rank):  # type: ignore[no-untyped-def]
    """bits[l, e]: bit r % 64 where rank r holds one of several replicas. Few tokens have one at home, and a clear bit says
    so without a look at the replicas, whose number a processor guesses badly."""
    bits = np.zeros(replicas_LE.shape, dtype=np.uint64)
    for layer in range(bits.shape[0]):
        for e in range(bits.shape[1]):
            for x in range(replicas_LE[layer, e] if replicas_LE[layer, e] > 1 else 0):
                bits[layer, e] |= np.uint64(1) << np.uint64(table_LEX[layer, e, x] // slots_per_rank % 64)
    return bits


@numba.njit(cache=True)
def inverses(most):  # type: ignore[no-untyped-def]
    """inverse[c] with n // c == (n * inverse[c]) >> 32 for n < 2^16, c <= most < 2^16: a division would take most of the
    time of route_tile."""
    inverse = np.zeros(most + 1, dtype=np.uint64)
    for c in range(1, most + 1):
        inverse[c] = np.uint64((1 << 32) // c + 1)
    return inverse


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
