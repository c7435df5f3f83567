"""EPLB: balance the load by replicating hot experts and packing the copies (DeepSeek's expert-parallel load balancer).

1. Groups of experts to nodes, heaviest first, each to the lightest node with room (keeps group-limited routing inside a
   node). 2. Inside a node, the next replica goes to the expert with the largest load per copy. 3. The copies of a node
to its ranks, packed as in 1. Without a number of groups that the nodes divide, one group on one node: the global policy.
Sums run in float32 and sorts are stable, so ties fall as in the published implementation (deepseek-ai/EPLB).
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .base import Placement, PlacementProblem


class Eplb:
    """DeepSeek's load balancer: hot experts replicated, copies packed so that ranks carry equal load.

    hierarchical: "auto" (groups to nodes where the model's n_group allows it), "always" or "never".

    distinct_ranks: never two copies of an expert on one rank (they would serve no purpose); the published algorithm
    allows it. Nodes come from the cluster: ep_size / ranks_per_node, 1 if that is no whole number.
    """

    def __init__(self, hierarchical: str = "auto", distinct_ranks: bool = False) -> None:
        if hierarchical not in ("auto", "always", "never"):
            raise UserError(f"placement.hierarchical='{hierarchical}' must be auto, always or never")
        self.hierarchical, self.distinct_ranks = hierarchical, distinct_ranks

    def place(self, problem: PlacementProblem) -> Placement:
        ranks, groups, per_node = problem.ep_size, problem.model.n_group, problem.cluster.ranks_per_node
        nodes = ranks // per_node if ranks % per_node == 0 else 1
        if self.hierarchical == "always" and groups % nodes:
            raise UserError(
                f"placement.hierarchical=always: {groups} expert groups cannot be split over {nodes} nodes; "
                "use auto or never"
            )
        if self.hierarchical == "never":
            groups = nodes = 1
        table = rebalance(problem.profile.load_LE, problem.slots, groups, nodes, ranks, self.distinct_ranks)
        return Placement(table, ranks, problem.layer_ids, problem.model.num_experts)


def rebalance(
    load_LE: NDArray[np.number], slots: int, groups: int, nodes: int, ranks: int, distinct_ranks: bool = False
) -> NDArray[np.int32]:
    """physical_to_logical_LP [L, slots] for loads [L, E]; hierarchical if nodes divide groups, else global.

    UserError where the sizes do not divide: E by groups, slots by ranks, ranks by nodes; or a load is no count.
    """
    experts = load_LE.shape[1]
    wrong = np.argwhere(~np.isfinite(load_LE) | (load_LE < 0))
    if len(wrong):
        layer, expert = (int(i) for i in wrong[0])
        raise UserError(
            f"EPLB: load of layer {layer}, expert {expert} is {load_LE[layer, expert]}; it must be finite and not negative"
        )
    if groups % nodes:
        groups = nodes = 1
    if experts % groups or slots % ranks or ranks % nodes or slots < experts:
        raise UserError(
            f"EPLB: {experts} experts in {groups} groups, {slots} slots, {ranks} ranks, {nodes} nodes: groups must divide "
            "experts, ranks divide slots, nodes divide ranks, and slots be at least experts"
        )
    if distinct_ranks and slots > experts * (ranks // nodes):
        raise UserError(f"EPLB: {slots} slots of {experts} experts on {ranks} ranks cannot all be distinct on a rank")
    return rebalance_layers(np.asarray(load_LE, dtype=np.float32), slots, groups, nodes, ranks, distinct_ranks)


@numba.njit(cache=True)
def rebalance_layers(load_LE, slots, groups, nodes, ranks, distinct_ranks):  # type: ignore[no-untyped-def]
    layers, experts = load_LE.shape
    group_size, node_experts, node_slots = experts // groups, experts // nodes, slots // nodes
    node_ranks, rank_slots = ranks // nodes, slots // ranks
    table = np.empty((layers, slots), dtype=np.int32)
    for layer in range(layers):
        load_E = load_LE[layer]
        group_load = np.zeros(groups, dtype=np.float32)
        for e in range(experts):
            group_load[e // group_size] += load_E[e]
        nothing = np.full(groups, -1, dtype=np.int64)
        node, place = pack(group_load, nodes, nothing)
        order = np.empty(experts, dtype=np.int64)  # logical experts, node by node
        for e in range(experts):
            group = e // group_size
            at = (node[group] * (groups // nodes) + place[group]) * group_size + e % group_size
            order[at] = e
        for n in range(nodes):
            mine = order[n * node_experts : (n + 1) * node_experts]
            copy_of, copies = replicate(load_E[mine], node_slots, node_ranks if distinct_ranks else node_slots)
            copy_load = np.empty(node_slots, dtype=np.float32)
            for p in range(node_slots):
                copy_load[p] = load_E[mine[copy_of[p]]] / np.float32(copies[copy_of[p]])
            apart = copy_of if distinct_ranks else np.full(node_slots, -1, dtype=np.int64)
            rank, place = pack(copy_load, node_ranks, apart)
            for p in range(node_slots):
                table[layer, n * node_slots + rank[p] * rank_slots + place[p]] = mine[copy_of[p]]
    return table


@numba.njit(cache=True)
def replicate(load_E, slots, most):  # type: ignore[no-untyped-def]
    """(copy_of [slots], copies [E]): the first E copies are the experts in order; `most` copies of one expert."""
    experts = len(load_E)
    copy_of = np.empty(slots, dtype=np.int64)
    copies = np.ones(experts, dtype=np.int64)
    for p in range(slots):
        if p < experts:
            copy_of[p] = p
            continue
        best, best_load = -1, np.float32(-1)
        for e in range(experts):
            share = load_E[e] / np.float32(copies[e])
            if copies[e] < most and (best < 0 or share > best_load):
                best, best_load = e, share
        copy_of[p] = best
        copies[best] += 1
    return copy_of, copies


@numba.njit(cache=True)
def pack(load_N, packs, kind_N):  # type: ignore[no-untyped-def]
    """(pack_N, place_N): N / packs items in each pack, heaviest first into the lightest pack with room.

    Items of one kind >= 0 (copies of an expert) stay out of each other's pack. If every pack with room holds the kind
    already, an item of a full pack without it moves into the room, of the load nearest to the newcomer's.
    """
    items = len(load_N)
    size = items // packs
    pack_N = np.empty(items, dtype=np.int64)
    place_N = np.zeros(items, dtype=np.int64)
    if size == 1:
        return np.arange(items), place_N
    members = np.empty((packs, size), dtype=np.int64)
    filled = np.zeros(packs, dtype=np.int64)
    total = np.zeros(packs, dtype=np.float32)
    for i in np.argsort(-load_N, kind="mergesort"):
        best, any_room = -1, -1
        for p in range(packs):
            if filled[p] == size:
                continue
            any_room = p if any_room < 0 or total[p] < total[any_room] else any_room
            if not _holds(members[p], filled[p], kind_N, kind_N[i]) and (best < 0 or total[p] < total[best]):
                best = p
        if best >= 0:
            members[best, filled[best]] = i
            filled[best] += 1
            total[best] += load_N[i]
            continue
        out_pack, out_place, gap = -1, -1, np.float32(np.inf)
        for p in range(packs):
            if _holds(members[p], filled[p], kind_N, kind_N[i]):
                continue
            for q in range(filled[p]):
                other = members[p, q]
                if _holds(members[any_room], filled[any_room], kind_N, kind_N[other]):
                    continue
                if abs(load_N[other] - load_N[i]) < gap:
                    out_pack, out_place, gap = p, q, abs(load_N[other] - load_N[i])
        moved = members[out_pack, out_place]
        members[out_pack, out_place] = i
        total[out_pack] += load_N[i] - load_N[moved]
        members[any_room, filled[any_room]] = moved
        filled[any_room] += 1
        total[any_room] += load_N[moved]
    for p in range(packs):
        for q in range(size):
            pack_N[members[p, q]] = p
            place_N[members[p, q]] = q
    return pack_N, place_N


@numba.njit(cache=True)
def _holds(members, filled, kind_N, kind):  # type: ignore[no-untyped-def]
    if kind >= 0:
        for q in range(filled):
            if kind_N[members[q]] == kind:
                return True
    return False
