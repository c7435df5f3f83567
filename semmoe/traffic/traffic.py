"""Traffic: what one batch moves between ranks, layer by layer.

The simulator makes it from routes with `count_traffic`; the harness fills the same type from what it sent.
Arrays carry a leading axis L so that a whole forward pass is counted at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..dispatch import METADATA_BYTES, DispatchSpec
from ..errors import UserError
from ..placement.base import Placement
from .collective import Collective, PairSums
from .over_ranks import total
from .route_counts import count_pairs, count_rows, node_copies, rank_of_slots
from .wiring import Int, Wiring

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Traffic:
    """Pairs, rows and collectives of one batch over L layers and G ranks. See DESIGN section 3.

    homes_LG             tokens per home rank (0 in tp_replicated, where no token has a home)
    assignment_pairs_LGG assignments from home s served on rank d; the diagonal is local
    rank_pairs_LGG       distinct (token, serving rank) pairs
    expert_rows_LG       rows that rank g's experts multiply; active_experts_LG slots of rank g with a row
    """

    homes_LG: Int
    assignment_pairs_LGG: Int
    rank_pairs_LGG: Int
    expert_rows_LG: Int
    active_experts_LG: Int
    collectives: tuple[Collective, ...] = ()
    tokens: int = 0
    metadata_bytes: float = 0.0

    @property
    def num_layers(self) -> int:
        return self.homes_LG.shape[0]

    @property
    def ep_size(self) -> int:
        return self.homes_LG.shape[1]

    def cut(self, layers: slice, tokens: int) -> Traffic:
        """Pairs and rows of some layers, of so many tokens, without collectives."""
        made = Traffic(
            self.homes_LG[layers],
            self.assignment_pairs_LGG[layers],
            self.rank_pairs_LGG[layers],
            self.expert_rows_LG[layers],
            self.active_experts_LG[layers],
            tokens=tokens,
        )
        return know(made, **{name: sums.cut(layers) for name, sums in self.known_sums().items()})

    def known_sums(self) -> dict[str, PairSums]:
        """Sums that were made already."""
        return {name: self.__dict__[name] for name in ("assignment_sums", "rank_sums") if name in self.__dict__}

    @cached_property
    def assignment_sums(self) -> PairSums:
        return PairSums.of(self.assignment_pairs_LGG)

    @cached_property
    def rank_sums(self) -> PairSums:
        return PairSums.of(self.rank_pairs_LGG)

    def assignments_L(self) -> Int:
        """(token, expert) assignments of tokens that have a home."""
        return self.remote_assignments_L() + self.local_assignments_L()

    def remote_assignments_L(self) -> Int:
        return self.assignment_sums.remote_L

    def local_assignments_L(self) -> Int:
        return total(self.assignment_sums.local_LG)

    def remote_rank_pairs_L(self) -> Int:
        return self.rank_sums.remote_L

    def exchanged_rows_LG(self) -> Int:
        """Rows that each rank sends for others to serve, and receives to serve: what dispatch and combine pack."""
        for c in self.collectives:
            if c.op == "dispatch" and c.rows_LGG is not None:
                return c.pair_sums.sent_LG + c.pair_sums.received_LG
        return np.zeros_like(self.homes_LG)

    def payload_bytes(self) -> float:
        return float(sum(c.remote_bytes_L(self.ep_size).sum() for c in self.collectives))


def differences(left: Traffic, right: Traffic) -> list[str]:
    """Every place where two Traffics differ (empty: equal to the last row). The plumbing check of DESIGN section 2."""
    found = []
    for name in ("homes_LG", "assignment_pairs_LGG", "rank_pairs_LGG", "expert_rows_LG", "active_experts_LG"):
        a, b = getattr(left, name), getattr(right, name)
        if a.shape != b.shape:
            found.append(f"{name}: shape {a.shape} against {b.shape}")
        elif not np.array_equal(a, b):
            where = tuple(int(i) for i in np.argwhere(a != b)[0])
            found.append(f"{name}{list(where)}: {a[where]} against {b[where]}")
    ops_left, ops_right = [c.op for c in left.collectives], [c.op for c in right.collectives]
    if ops_left != ops_right:
        return [*found, f"collectives: {ops_left} against {ops_right}"]
    for a, b in zip(left.collectives, right.collectives, strict=True):
        if a.row_bytes != b.row_bytes:
            found.append(f"{a.op}: {a.row_bytes} against {b.row_bytes} bytes a row")
        for name in ("rows_LGG", "buffer_rows_L"):
            x, y = getattr(a, name), getattr(b, name)
            if (x is None) != (y is None) or (x is not None and not np.array_equal(x, y)):
                found.append(f"{a.op}.{name} differs")
    if left.metadata_bytes != right.metadata_bytes:
        found.append(f"metadata_bytes: {left.metadata_bytes} against {right.metadata_bytes}")
    return found


def count_traffic(
    slots_TLk: NDArray[np.integer],
    homes_TL: NDArray[np.integer] | None,
    num_slots: int,
    ep_size: int,
    spec: DispatchSpec,
    wiring: Wiring | None = None,
    returns_TL: NDArray[np.integer] | None = None,
) -> Traffic:
    """Traffic of T tokens whose choices are served by `slots_TLk`, with the token at home `homes_TL` per layer.

    homes_TL may be [T] (one home for all layers) or None for tp_replicated. T = 0 is a batch of idle ranks. wiring: of
    several nodes, between which rows that several ranks need cross once; over many ranks ports stand for pairs then.
    returns_TL: where the combine sums each token's outputs (a2a_dedup in tp_shuffled; None: at its home).
    """
    tokens, layers, _ = slots_TLk.shape
    if (homes_TL is None) != (spec.flow == "tp_replicated"):
        raise ValueError("homes are needed in every flow but tp_replicated")
    if homes_TL is None:
        rows_LG, active_LG = count_rows(slots_TLk, num_slots, ep_size)
        pairs = 0 if wiring is not None and wiring.wide else ep_size
        zero = np.zeros((layers, pairs, pairs), dtype=np.int64)
        return with_collectives(
            Traffic(np.zeros((layers, ep_size), dtype=np.int64), zero, zero, rows_LG, active_LG, tokens=tokens), spec
        )
    homes = np.broadcast_to(homes_TL[:, None], (tokens, layers)) if homes_TL.ndim == 1 else homes_TL
    homes = np.ascontiguousarray(homes)
    if wiring is not None and returns_TL is not None:
        wiring = wiring.with_pairs()
    if wiring is not None and wiring.wide:
        if returns_TL is not None:
            raise UserError(f"re-homing in the combine is not counted over {ep_size} ranks; use fewer ranks")
        from .wide import count_wide

        one_LP1 = np.broadcast_to(np.arange(num_slots)[:, None], (layers, num_slots, 1))
        once_LP = np.ones((layers, num_slots), dtype=np.int32)
        return count_wide(slots_TLk, np.arange(tokens), homes, one_LP1, once_LP, ep_size, num_slots, spec, wiring)
    rank_LP = rank_of_slots(layers, num_slots, ep_size)
    traffic = Traffic(*count_pairs(slots_TLk, np.arange(tokens), rank_LP, homes, ep_size), tokens=tokens)
    if wiring is None or wiring.nodes == 1:
        traffic = with_collectives(traffic, spec)
        return traffic if returns_TL is None else rehomed(traffic, slots_TLk, returns_TL, num_slots, spec)
    copies = np.broadcast_to(
        traffic.homes_LG[:, :, None], (layers, ep_size, wiring.nodes)
    )  # every row to every node once
    served = None
    if spec.dispatcher == "allgather_rs":
        served = copies
    elif spec.dispatcher == "a2a_dedup":
        served = node_copies(slots_TLk, homes, num_slots, ep_size, wiring.ranks_per_node)
    traffic = with_collectives(traffic, spec, copies, served)
    return traffic if returns_TL is None else rehomed(traffic, slots_TLk, returns_TL, num_slots, spec, wiring)


def count_trace_rows(
    experts_NLk: NDArray[np.integer],
    rows_T: NDArray[np.integer],
    homes_T: NDArray[np.integer],
    placement: Placement,
    spec: DispatchSpec,
    wiring: Wiring | None = None,
    step_T: NDArray[np.int64] | None = None,
    steps: int = 1,
) -> Traffic:
    """What count_traffic says of rows of a trace with one home a token, straight from the trace: on one node without
    replicas, or over many ranks (`wiring.wide`) with the replicas that replica_router.Local takes.

    steps: as many steps, token t in step step_T[t], as one of steps * L layers (one node).
    """
    if wiring is not None and wiring.wide:
        from .wide import count_wide

        tables = placement.logical_to_physical_LEX, placement.replicas_LE
        sizes = placement.ep_size, placement.num_slots
        return count_wide(experts_NLk, rows_T, homes_T[:, None], *tables, *sizes, spec, wiring)
    counts = count_pairs(experts_NLk, rows_T, placement.rank_LE, homes_T[:, None], placement.ep_size, step_T, steps)
    return with_collectives(Traffic(*counts, tokens=len(rows_T)), spec)


def rehomed(
    traffic: Traffic,
    slots_TLk: NDArray[np.integer],
    returns_TL: NDArray[np.integer],
    num_slots: int,
    spec: DispatchSpec,
    wiring: Wiring | None = None,
) -> Traffic:
    """The traffic when outputs are summed at `returns_TL` instead of the homes (schedule/rehome.py).

    Expert ids go out right after the gate, each serving rank sends its sum of a token to the new home, and the SAG
    leaves from there.
    """
    returns = np.ascontiguousarray(returns_TL)
    tokens, layers, _ = slots_TLk.shape
    rank_LP = rank_of_slots(layers, num_slots, traffic.ep_size)
    returned = count_pairs(slots_TLk, np.arange(tokens), rank_LP, returns, traffic.ep_size)
    returns_LG, served = returned.homes_LG, returned.rank_pairs_LGG
    before, dispatch, combine, after = traffic.collectives[:4]
    ids = replace(after, op="expert_ids", row_bytes=spec.top_k * 2.0)  # from the homes
    gathered = sums = None
    if wiring is not None:
        gathered = np.broadcast_to(returns_LG[:, :, None], (*returns_LG.shape, wiring.nodes))
        sums = node_copies(slots_TLk, returns, num_slots, traffic.ep_size, wiring.ranks_per_node)
    outward = np.repeat(returns_LG[:, :, None], traffic.ep_size, axis=2)
    combine = replace(combine, rows_LGG=np.ascontiguousarray(served.swapaxes(1, 2)), copies_LGN=sums)
    after = replace(after, rows_LGG=outward, copies_LGN=gathered)
    return replace(traffic, collectives=(before, ids, dispatch, combine, after))


def with_collectives(
    traffic: Traffic, spec: DispatchSpec, gathered_LGN: Int | None = None, served_LGN: Int | None = None
) -> Traffic:
    """The traffic with the list of collectives that the flow and dispatcher imply, and the metadata bytes.

    gathered_LGN, served_LGN: copies to nodes (see Collective) of the collectives around dispatch and combine, and of these.
    """
    homes_LG, ep_size = traffic.homes_LG, traffic.ep_size
    layers = traffic.num_layers
    if spec.flow == "tp_replicated":
        buffer = np.full(layers, traffic.tokens, dtype=np.int64)
        reduce = Collective("all_reduce", spec.row_bytes, buffer_rows_L=buffer)
        return replace(traffic, collectives=(reduce, reduce))
    if spec.dispatcher == "allgather_rs":
        pairs = everywhere(homes_LG)
        sums = PairSums.of(pairs)
        metadata = float((homes_LG.sum(axis=1) * (ep_size - 1)).sum() * spec.top_k * METADATA_BYTES)
    else:
        dedup = spec.dispatcher == "a2a_dedup"
        pairs = traffic.rank_pairs_LGG if dedup else traffic.assignment_pairs_LGG
        sums = traffic.rank_sums if dedup else traffic.assignment_sums
        metadata = float(traffic.remote_assignments_L().sum() * METADATA_BYTES)
    dispatch = Collective("dispatch", spec.dispatch_row_bytes, pairs, copies_LGN=served_LGN)
    combine = Collective("combine", spec.combine_row_bytes, pairs.swapaxes(1, 2), copies_LGN=served_LGN)
    collectives = [know(dispatch, pair_sums=sums), know(combine, pair_sums=sums.reversed())]
    if spec.flow != "dp":
        outward, before, after = everywhere(homes_LG), "reduce_scatter", "all_gather"
        if spec.flow == "tp_shuffled":
            before, after = "srs", "sag"
        collectives.insert(0, Collective(before, spec.row_bytes, outward.swapaxes(1, 2), copies_LGN=gathered_LGN))
        collectives.append(Collective(after, spec.row_bytes, outward, copies_LGN=gathered_LGN))
        if spec.carry_expert_ids:
            collectives.append(Collective("expert_ids", spec.top_k * 2.0, outward, copies_LGN=gathered_LGN))
    made = replace(traffic, collectives=tuple(collectives), metadata_bytes=metadata)
    return know(made, **traffic.known_sums())


def everywhere(homes_LG: Int) -> Int:
    """rows_LGG of every row to every rank."""
    return np.broadcast_to(homes_LG[:, :, None], (*homes_LG.shape, homes_LG.shape[1]))


def know(made: Made, **cached: object) -> Made:
    """The object, told the values of cached properties that need no second computation."""
    made.__dict__.update(cached)
    return made
