"""PullExchange: dispatch, experts and combine of one layer by the kernels of `harness.kernels`, over peers' memory.

    routes of all ranks' tokens (slots and weights, k each: metadata) -> who serves what, worked out on every rank
    a2a_assignment   pull a row per assignment, sorted by expert -> experts -> answers by assignment; home pulls k of them
    a2a_dedup        pull a row per served token -> experts -> one weighted sum a token; home pulls one a serving rank

No sizes are exchanged and rows are read from the home's own buffer. Letters: T tokens of all ranks in rank order (rank
0's first), A = T * k assignments, S slots of a rank. Counts come from the counters that the kernels increment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semmoe.dispatch import DispatchSpec

from ..kernels.align import moe_align
from ..kernels.grouped import Tiling, grouped_matmul, tiling_of
from ..kernels.launch_exchange import Group, Served, combine, pull, serve_assignments, serve_tokens, sum_own
from ..reference.ranking import TokenRanking
from ..timing import PhaseTimer
from ..transport.base import Transport, address_table
from ..transport.packing import row_bytes
from ..transport.pull import PullTransport, counted_by, launching
from ..weights import RankWeights


def can_pull(spec: DispatchSpec) -> bool:
    """Whether the kernels serve this dispatcher: rows must travel in the activation dtype."""
    plain = spec.activation_dtype == spec.dispatch_dtype == spec.combine_dtype
    return plain and spec.dispatcher in ("a2a_assignment", "a2a_dedup")


class PullExchange:
    """Of one layer; see the module. `forward` is collective."""

    def __init__(self, spec: DispatchSpec, transport: PullTransport, slots_per_rank: int) -> None:
        self.transport, self.slots_per_rank = transport, slots_per_rank
        self.dedup = spec.dispatcher == "a2a_dedup"

    def forward(
        self, x_nH: Tensor, slots_nk: Tensor, weights_nk: Tensor, weights: RankWeights, timer: PhaseTimer
    ) -> Tensor:
        """[n, H]: the weighted sums of the experts' outputs of this rank's n tokens."""
        transport, rank = self.transport, self.transport.rank
        group, counts_G = self._gather_routes(slots_nk, weights_nk)
        timer.lap("permute")
        (x_G,), barrier = transport._offer([x_nH], counts_G)
        with launching(x_nH.device):
            served = serve(group, rank, self.dedup)
            rows_PH = x_nH.new_empty(len(served.list_P), x_nH.shape[1])
            pulled_BG = pull(address_table(x_G), group, served, rank, rows_PH, barrier)
        rows_pulled_G = counted_by(pulled_BG, barrier)
        transport._release()
        timer.lap("dispatch")
        tokens, k = group.slots_Tk.shape
        answers = transport._lend(tokens if self.dedup else tokens * k, x_nH.shape[1], x_nH.dtype, x_nH.device)
        with launching(x_nH.device):
            served_S = answer(group, served, rank, rows_PH, weights, answers)
        timer.lap("experts")
        o_G, barrier = transport._lent(answers)
        with launching(x_nH.device):
            y_nH = x_nH.new_empty(len(x_nH), x_nH.shape[1])
            pulled_BG = combine(address_table(o_G), group, rank, y_nH, self.dedup, barrier)
        answers_pulled_G = counted_by(pulled_BG, barrier)
        transport._release()
        timer.lap("combine")
        count_experts(transport, served_S)
        count_exchange(
            transport, group, counts_G, slots_nk, row_bytes(x_nH), rows_pulled_G, answers_pulled_G, self.dedup
        )
        return y_nH

    def _gather_routes(self, slots_nk: Tensor, weights_nk: Tensor) -> tuple[Group, list[int]]:
        """(the step as every rank knows it, tokens of each rank)."""
        transport, k = self.transport, slots_nk.shape[1]
        mine = route_words(slots_nk, weights_nk)
        routes_G = transport._publish(mine)
        counts_G = [len(routes) for routes in routes_G]
        both_T = torch.cat(routes_G)
        transport._release()
        away = sum(counts_G) - len(mine)
        transport.counter.metadata(len(mine) * (transport.ranks - 1) * row_bytes(mine), away * row_bytes(mine))
        weights_Tk = both_T[:, k:].contiguous().view(torch.float32)
        plan = rank_order(counts_G, mine.device)
        return Group(plan, both_T[:, :k].contiguous(), weights_Tk, self.slots_per_rank, transport.ranks), counts_G


def route_words(slots_nk: Tensor, weights_nk: Tensor) -> Tensor:
    """int32 [n, 2 k]: slots, then the bits of the fp32 weights; what travels of a token's routes."""
    return torch.cat([slots_nk.to(torch.int32), weights_nk.float().contiguous().view(torch.int32)], dim=1)


def serve(group: Group, rank: int, dedup: bool) -> Served:
    """What this rank pulls. Reads nothing to the host, nor does `answer`."""
    return serve_tokens(group, rank) if dedup else serve_assignments(group, rank, _tiling(group).block_m)


def answer(group: Group, served: Served, rank: int, rows_PH: Tensor, weights: RankWeights, answers: Tensor) -> Tensor:
    """Write what this rank's experts say of the pulled rows, [T, H] weighted sums where tokens are served, else [A, H], and
    nothing about what others serve; int32 [S] rows of each expert."""
    (tokens, k), tiling = group.slots_Tk.shape, _tiling(group)
    if served.row_T is not None:
        alignment = moe_align(group.own_slot_A(rank), group.slots_per_rank, tiling.block_m)
        row_A = served.row_T.repeat_interleave(k, output_size=tokens * k)
        out_AH = rows_PH.new_empty(tokens * k, rows_PH.shape[1])
    else:
        assert served.alignment is not None
        alignment, row_A, out_AH = served.alignment, served.place_A(), answers
    inner_AF = grouped_matmul(rows_PH, row_A, weights.w13_S2FH, alignment, True, tiling)
    grouped_matmul(inner_AF, None, weights.w2_SHF, alignment, False, tiling, out_AH)
    if served.row_T is not None:
        sum_own(out_AH, group, served, rank, answers)
    return alignment.counts_S


def _tiling(group: Group) -> Tiling:
    return tiling_of(group.slots_Tk.numel(), group.slots_per_rank * group.ranks, group.slots_Tk.device)


def count_experts(transport: Transport, served_S: Tensor) -> None:
    counts_S = served_S.tolist()
    now = transport.counter.now
    now.expert_rows, now.active_experts = sum(counts_S), sum(n > 0 for n in counts_S)


def count_exchange(
    transport: Transport,
    group: Group,
    places_G: Sequence[int],
    slots_nk: Tensor,
    width: int,
    rows_pulled_G: list[int],
    answers_pulled_G: list[int],
    dedup: bool,
) -> None:
    """Senders count by their own routes, servers by what their kernels pulled and by the routes that came.

    places_G: the group's tokens that stand for each rank, one after another. width: bytes of a row.
    """
    now, ranks = transport.counter.now, transport.ranks
    chosen_nG = torch.stack([slots_nk // group.slots_per_rank == g for g in range(ranks)], dim=2).sum(dim=1)
    now.assignments_sent_G, now.pairs_sent_G = chosen_nG.sum(dim=0).tolist(), (chosen_nG > 0).sum(dim=0).tolist()
    mine_T = (group.own_slot_A(transport.rank) >= 0).view(group.slots_Tk.shape).sum(dim=1)
    came_G = mine_T.split(list(places_G))
    now.assignments_served_G = [int(part.sum()) for part in came_G] if dedup else rows_pulled_G
    now.pairs_served_G = rows_pulled_G if dedup else [int((part > 0).sum()) for part in came_G]
    sent_G = now.pairs_sent_G if dedup else now.assignments_sent_G
    transport.counter.exchange("dispatch", width, sent_G, rows_pulled_G)
    transport.counter.exchange("combine", width, rows_pulled_G, answers_pulled_G)


def rank_order(counts_G: Sequence[int], device: torch.device) -> TokenRanking:
    """The plan of tokens that stand in rank order: nothing is permuted. Worked example, counts [2, 1]: owner [0, 0, 1],
    slot [0, 1, 0]."""
    counts = torch.tensor(counts_G, dtype=torch.int64)
    starts = counts.cumsum(0) - counts
    owner_T = torch.arange(len(counts)).repeat_interleave(counts)
    perm_T = torch.arange(len(owner_T))
    made = (perm_T, perm_T - starts[owner_T], owner_T, counts, starts)
    return TokenRanking(*(tensor.to(device) for tensor in made))
