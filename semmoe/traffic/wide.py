"""Traffic over many ranks: port sums stand for the pairs, whose matrices would grow with layers * ranks^2.

Counted in one pass over the routes: rows per expert, rows that each rank sends and receives, and the rows on every link of
the dispatch (ports.py), straight or with one copy a node. What is gathered everywhere follows from the homes alone.
Cost: tokens * layers * k + layers * ranks * (ranks of a node + nodes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from ..dispatch import METADATA_BYTES, DispatchSpec
from ..replica_router import home_bits, inverses, route_tile
from .collective import Collective
from .ports import Ports, gathered_ports, no_rows, relay, wiring_arrays
from .traffic import Traffic
from .wiring import Int, Wiring

TILE = 1024  # tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class WideTraffic(Traffic):
    """Traffic without pairs (their arrays are [L, 0, 0]); the sums over them are fields."""

    assignments_sum_L: Int
    local_L: Int
    remote_pairs_L: Int
    exchanged_LG: Int

    def assignments_L(self) -> Int:
        return self.assignments_sum_L

    def remote_assignments_L(self) -> Int:
        return self.assignments_sum_L - self.local_L

    def local_assignments_L(self) -> Int:
        return self.local_L

    def remote_rank_pairs_L(self) -> Int:
        return self.remote_pairs_L

    def exchanged_rows_LG(self) -> Int:
        return self.exchanged_LG


def count_wide(
    routes_NLk: NDArray[np.integer],
    rows_T: NDArray[np.integer],
    homes_TH: NDArray[np.integer],
    slots_LXC: NDArray[np.integer],
    copies_LX: NDArray[np.integer],
    ep_size: int,
    num_slots: int,
    spec: DispatchSpec,
    wiring: Wiring,
) -> WideTraffic:
    """What traffic.count_traffic counts, of any flow with homes, without pair matrices.

    Token t is row rows_T[t] of routes_NLk; the id x that it holds in a layer has slots slots_LXC[layer, x, :copies], among
    which replica_router.Local chooses. homes_TH: [T, L], or [T, 1] where it is the same in all layers.
    """
    tokens, (layers, k) = len(rows_T), routes_NLk.shape[1:]
    dedup, gathered = spec.dispatcher == "a2a_dedup", spec.dispatcher == "allgather_rs"
    homes = np.ascontiguousarray(homes_TH, dtype=np.int64)
    routes = np.asarray(routes_NLk), np.ascontiguousarray(rows_T, dtype=np.int64), homes
    tables = np.ascontiguousarray(slots_LXC, dtype=np.int32), np.ascontiguousarray(copies_LX, dtype=np.int32)
    counted = count_routes(*routes, *tables, ep_size, num_slots, dedup, *wiring_arrays(wiring))
    homes_LG, hits_LP, local_L, pairs_L, exchanged_LG, *links = counted
    everywhere = gathered_ports(homes_LG, wiring) if gathered or spec.flow != "dp" else None
    around = everywhere if gathered else Ports(*links)
    assert around is not None
    if gathered:
        total_L = homes_LG.sum(axis=1, keepdims=True)
        exchanged_LG = homes_LG * (ep_size - 1) + total_L - homes_LG
        metadata = float((total_L * (ep_size - 1)).sum() * k * METADATA_BYTES)
    else:
        metadata = float((tokens * layers * k - local_L.sum()) * METADATA_BYTES)
    collectives = [
        Collective("dispatch", spec.dispatch_row_bytes, counted=around),
        Collective("combine", spec.combine_row_bytes, counted=around.reversed()),
    ]
    if spec.flow != "dp":
        assert everywhere is not None
        before, after = ("srs", "sag") if spec.flow == "tp_shuffled" else ("reduce_scatter", "all_gather")
        collectives.insert(0, Collective(before, spec.row_bytes, counted=everywhere.reversed()))
        collectives.append(Collective(after, spec.row_bytes, counted=everywhere))
        if spec.carry_expert_ids:
            collectives.append(Collective("expert_ids", spec.top_k * 2.0, counted=everywhere))
    none = np.zeros((layers, 0, 0), dtype=np.int64)
    by_rank = hits_LP.astype(np.int64).reshape(layers, ep_size, -1)
    return WideTraffic(
        homes_LG=homes_LG,
        assignment_pairs_LGG=none,
        rank_pairs_LGG=none,
        expert_rows_LG=by_rank.sum(axis=2),
        active_experts_LG=(by_rank > 0).sum(axis=2),
        collectives=tuple(collectives),
        tokens=tokens,
        metadata_bytes=metadata,
        assignments_sum_L=np.full(layers, tokens * k, dtype=np.int64),
        local_L=local_L,
        remote_pairs_L=pairs_L,
        exchanged_LG=exchanged_LG,
    )


@numba.njit(cache=True)
def count_routes(
    routes_NLk, rows_T, homes_TH, slots_LXC, copies_LX, ep_size, num_slots, dedup, inner, nic_G, leaf_N, leaves
):  # type: ignore[no-untyped-def]
    """(homes_LG, hits_LP, local_L, remote_pairs_L, exchanged_LG, near, out, into, up, down); links as in Ports.

    dedup: one copy a node, relayed there; otherwise one row an assignment, straight.
    """
    tokens, (layers, k) = len(rows_T), routes_NLk.shape[1:]
    per_rank = num_slots // ep_size
    homes, hits = np.zeros((layers, ep_size), dtype=np.int64), np.zeros((layers, num_slots), dtype=np.uint32)
    near, out, into, up, down = no_rows(layers, ep_size, inner, nic_G, leaves, homes)
    local, pairs = np.zeros(layers, dtype=np.int64), np.zeros(layers, dtype=np.int64)
    exchanged = np.zeros((layers, ep_size), dtype=np.int64)
    # rows that a rank gets from other nodes, by their leaf; rows to the places of its node
    entered = np.zeros((layers, leaves, ep_size), dtype=np.uint32)
    inside = np.zeros((layers, ep_size, inner), dtype=np.uint32)
    rank_of = (np.arange(num_slots) // per_rank).astype(np.uint16)
    node_of = (np.arange(ep_size) // inner).astype(np.uint16)
    leaf_of, ranks_a_node = leaf_N[nic_G], np.uint64(inner)
    seen, seen_node = np.zeros(ep_size, dtype=np.uint32), np.zeros(node_of[-1] + 1, dtype=np.uint32)
    inverse_C, bits_LX = inverses(slots_LXC.shape[2]), home_bits(slots_LXC, copies_LX, per_rank)
    stamp, tile = np.uint32(0), np.empty((TILE, k), dtype=np.int32)
    for begin in range(0, tokens, TILE):  # routes of a tile and counters of a layer both stay in the cache
        for layer in range(layers):
            tables = slots_LXC[layer], copies_LX[layer], bits_LX[layer], inverse_C
            slots_Tk = tile[: min(TILE, tokens - begin)]
            route_tile(routes_NLk, rows_T, homes_TH, layer, begin, *tables, per_rank, slots_Tk)
            for i in range(len(slots_Tk)):
                t = begin + i
                home = np.uint64(homes_TH[t, layer if homes_TH.shape[1] > 1 else 0])
                here, leaf = np.uint64(node_of[home]), np.uint64(leaf_of[home])
                place = home - here * ranks_a_node
                stamp += np.uint32(1)
                at_home, distinct, rows, crossed = 0, 0, 0, 0
                for j in range(k):
                    slot = np.uint64(slots_Tk[i, j])  # unsigned: no test for a negative index
                    rank = np.uint64(rank_of[slot])
                    hits[layer, slot] += np.uint32(1)
                    at_home += rank == home
                    first = seen[rank] != stamp
                    seen[rank] = stamp
                    distinct += first
                    if dedup and not first:
                        continue
                    rows += 1
                    node, via = np.uint64(node_of[rank]), home
                    if node != here:
                        via = node * ranks_a_node + place if dedup else rank
                        if via >= ep_size:  # the last node is not full
                            via = np.uint64(relay(np.int64(place), np.int64(node), inner, ep_size))
                        if not dedup or seen_node[node] != stamp:
                            seen_node[node] = stamp
                            crossed += 1
                            entered[layer, leaf, via] += np.uint32(1)
                    inside[layer, via, rank - node * ranks_a_node] += np.uint32(1)
                served = min(at_home, 1) if dedup else at_home
                homes[layer, home] += 1
                local[layer] += at_home
                pairs[layer] += distinct - min(at_home, 1)
                exchanged[layer, home] += rows - 2 * served  # what it served itself is neither sent nor received
                out[layer, nic_G[home]] += crossed
    for layer in range(layers):
        for g in range(ep_size):
            for other in range(min(inner, ep_size - g // inner * inner)):
                near[layer, g, other] = inside[layer, g, other]
                exchanged[layer, g // inner * inner + other] += inside[layer, g, other]
            for source in range(leaves):
                came = entered[layer, source, g]
                into[layer, nic_G[g]] += came
                near[layer, g, g % inner] -= 0 if dedup else came  # straight from their rank
                if source != leaf_of[g]:
                    up[layer, source] += came
                    down[layer, leaf_of[g]] += came
    return homes, hits, local, pairs, exchanged, near, out, into, up, down
