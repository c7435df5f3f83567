"""DeviceLayer: an MoELayer of one shape as device work only: no size is read to the host, so that a graph can hold it.

Its phases; what peers wrote in one is read behind a barrier of all ranks in the next (inside its first kernel; where ranks
share a stream, the order of the stream). Rows travel by the same kernels as in eager mode, between `FixedBuffers`:

    dp             gate | pull, experts | combine
    allgather_rs   gate | pull all rows, experts | SRS of the answers                        (flow dp)
    tp_*           (homes,) rank tokens, SRS, gate | pull, experts | combine | SAG
    tp_replicated  SRS | SAG, gate, experts | SRS | SAG                                      (an all-reduce is SRS and SAG)

Every rank has N places for tokens at home; token i of rank g is number g N + i of the group. How many places are taken
is a count on the device: empty ones are neither pulled nor multiplied. Kernels leave their counts in device memory, from
where `count` reads them after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.home import home_tokens
from ..kernels.launch import BarrierState, CarriedIds, launch_sag, launch_srs
from ..kernels.launch_exchange import Group, Served, combine, pull, serve_tokens
from ..kernels.rank_tokens import rank_tokens
from ..kernels.scores import DeviceTables, score_tokens
from ..layer import LayerOutput, MoELayer
from ..reference.ranking import TokenRanking
from ..transport.packing import row_bytes
from .fixed import FixedBuffers, Shape, answer_rows
from .pulled import answer, count_exchange, count_experts, route_words, serve


@dataclass(frozen=True, eq=False)
class Planned:
    """What a rank plans the homes of a layer with. after: the layer before, whose carried ids lie in its buffers when this one
    runs (None: the first)."""

    tables: DeviceTables
    capacity: int
    after: DeviceLayer | None


class DeviceLayer:
    """Routes are forced, weights those of the gate. `phases`: to be run in order, on all ranks alike.

    barrier: the state that kernels wait with; None where ranks share a stream and are launched phase by phase.
    planned: this rank plans the homes (measure.plan=device); they are not filled in then.
    """

    def __init__(
        self,
        layer: MoELayer,
        shape: Shape,
        fixed: FixedBuffers,
        barrier: BarrierState | None,
        planned: Planned | None = None,
    ) -> None:
        self.layer, self.shape, self.spec, self.barrier, self.planned = layer, shape, layer.spec, barrier, planned
        self.rank, self.ranks = layer.transport.rank, layer.transport.ranks
        self.replicated = self.spec.flow == "tp_replicated"
        self.dedup, self.everywhere = self.spec.dispatcher == "a2a_dedup", self.spec.dispatcher == "allgather_rs"
        self.fixed, self.device = fixed, fixed.answers.local.device
        self._make_inputs()
        self._make_group()
        self.answers_AH = fixed.answers.local[: answer_rows(self.spec, self.ranks, shape)]
        self.rows_NH, self.done_NH = fixed.rows.local[: shape.rows], fixed.done.local[: shape.rows]
        outputs = shape.rows if self.spec.flow == "dp" else shape.tokens
        self.y = torch.empty(outputs, self.spec.hidden, dtype=layer.dtype, device=self.device)
        self.phases = self._phases()

    def fill(
        self, x: Tensor, slots_nk: Tensor, homes_T: NDArray[np.integer] | None, token_T: Tensor | None = None
    ) -> None:
        """The inputs of `MoELayer.forward`, and in every flow but tp_replicated the home of each token of the group, or
        its id where this rank plans."""
        self.filled = len(x)
        if self.spec.flow == "dp":
            assert homes_T is not None
            self.rows_NH[: len(x)].copy_(x)
            self.slots.fill_(-1)
            self.counts_G.copy_(torch.from_numpy(np.bincount(homes_T, minlength=self.ranks)))
        else:
            self.fixed.x.local[: len(x)].copy_(x)
            if homes_T is not None:
                self.owner_T.copy_(torch.from_numpy(np.ascontiguousarray(homes_T, dtype=np.int64)))
            if token_T is not None:
                self.token_T.copy_(token_T)
        self.slots[: len(x)].copy_(slots_nk)

    def poison(self) -> None:
        """What is not written from now on shows as NaN."""
        inputs = self.rows_NH.clone() if self.spec.flow == "dp" else None
        self.fixed.poison()
        self.y.fill_(torch.nan)
        if inputs is not None:
            self.rows_NH.copy_(inputs)

    def output(self) -> LayerOutput:
        """After the phases: as `MoELayer.forward`. Reads the device."""
        mine = self.filled if self.spec.flow == "dp" or self.replicated else int(self.counts_G[self.rank])
        flips = self.layer.gate.flips(self.chosen_nk[:mine], self.own_slots_nk[:mine])
        carried = self.ids_Tk.long() if self.spec.carry_expert_ids else None
        return LayerOutput(self.y[: self.filled].clone(), flips, carried)

    def count(self) -> None:
        """What the kernels of one step counted, to the transport's counter. Reads the device. RuntimeError when a kernel
        gave up waiting for a rank."""
        if self.barrier is not None:
            self.barrier.check()
        counter = self.layer.transport.counter
        counter.start_layer()
        now, width = counter.now, row_bytes(self.y)
        count_experts(self.layer.transport, self.served_S)
        if self.spec.flow != "dp":
            now.tokens = self.filled
        if self.replicated:
            counter.all_reduce(width, self.filled)
            return counter.all_reduce(width, self.filled)
        counts_G = self.counts_G.tolist()
        now.homes = counts_G[self.rank]
        before, after = ("srs", "sag") if self.spec.flow == "tp_shuffled" else ("reduce_scatter", "all_gather")
        if self.spec.flow != "dp":
            counter.exchange(before, width, counts_G, _total(self.scattered_BG))
        self._count_moe(counts_G, width)
        if self.spec.flow != "dp":
            for op, bytes_of_row in ((after, width), ("expert_ids", 2 * self.spec.top_k)):
                if op == after or self.spec.carry_expert_ids:
                    counter.exchange(op, bytes_of_row, [now.homes] * self.ranks, _total(self.gathered_BG))

    def _count_moe(self, counts_G: list[int], width: int) -> None:
        counter, mine = self.layer.transport.counter, counts_G[self.rank]
        routes_G, rows_G, back_G = _total(self.routes_pulled_BG), _total(self.rows_pulled_BG), _total(self.back_BG)
        words = row_bytes(self.fixed.routes.local)
        counter.metadata(mine * (self.ranks - 1) * words, (sum(routes_G) - routes_G[self.rank]) * words)
        places_G, slots_nk = [self.shape.rows] * self.ranks, self.own_slots_nk[:mine]
        if not self.everywhere:
            transport = self.layer.transport
            return count_exchange(transport, self.group, places_G, slots_nk, width, rows_G, back_G, self.dedup)
        served_Tk = (self.group.own_slot_A(self.rank) >= 0).view(self.group.slots_Tk.shape)
        now = counter.now
        now.assignments_served_G = [int(part.sum()) for part in served_Tk.split(places_G)]
        now.pairs_served_G = [int(part.any(dim=1).sum()) for part in served_Tk.split(places_G)]
        counter.exchange("dispatch", width, [mine] * self.ranks, rows_G)
        counter.exchange("combine", width, counts_G, back_G)

    # Phases. Nothing below reads the device.

    def _phases(self) -> list[Callable[[], None]]:
        if self.replicated:
            return [self._sum_inputs, self._answer_here, self._sum_answers, self._gather_answers]
        moe = [self._all_rows, self._sum_home] if self.everywhere else [self._pull_and_answer, self._combine]
        return [self._gate_rows, *moe] if self.spec.flow == "dp" else [self._scatter, *moe, self._gather]

    def _plan_homes(self, planned: Planned) -> None:
        before = planned.after or self  # the first layer looks at neither
        score_TG, _ = score_tokens(planned.tables, self.token_T, before.ids_Tk, before.chain_row_T, self.chain_row_T)
        self.owner_T.copy_(home_tokens(score_TG, planned.capacity))

    def _scatter(self) -> None:
        if self.planned is not None:
            self._plan_homes(self.planned)
        self.plan = plan = rank_tokens(self.owner_T, self.ranks)
        self.counts_G.copy_(plan.counts_on_device_G)
        x = self.fixed.x
        _, self.scattered_BG = launch_srs(
            x.table_G, x.local, plan, self.rank, out_NH=self.rows_NH, barrier=self.barrier
        )
        place_N = (plan.starts_on_device_G[self.rank] + self._place_N).clamp(max=self.shape.tokens - 1)
        slots_nk = self.slots.index_select(0, plan.perm_T.index_select(0, place_N))
        taken_N = self._place_N < plan.counts_on_device_G[self.rank]
        self._gate(torch.where(taken_N[:, None], slots_nk, -1))
        if self.spec.carry_expert_ids:
            self.fixed.ids.local[: self.shape.rows].copy_(self.own_slots_nk)

    def _gate_rows(self) -> None:
        self._gate(self.slots)

    def _gate(self, slots_nk: Tensor) -> None:
        """Of the rows at home; empty places give whatever they give, and nobody reads it."""
        weights_nk = self._weights(self.rows_NH, slots_nk)
        self.fixed.routes.local[: self.shape.rows].copy_(route_words(slots_nk, weights_nk))

    def _weights(self, rows_nH: Tensor, slots_nk: Tensor) -> Tensor:
        gate = self.layer.gate
        score_nE = gate.score(rows_nH)
        self.own_slots_nk, self.chosen_nk = slots_nk, gate.chosen(score_nE)
        return gate.weights(score_nE, slots_nk.clamp(min=0))

    def _routes(self) -> Served:
        """Everybody's routes into the group; what is taken of the group's places."""
        group, k = self.group, self.spec.top_k
        taken_T = group.plan.slot_T < self.counts_G.index_select(0, group.plan.owner_T)
        taken = Served(torch.where(taken_T, group.plan.perm_T, len(taken_T)), self._limit_1, 1, 1, len(taken_T))
        both_T = torch.empty(len(taken_T), 2 * k, dtype=torch.int32, device=self.device)
        self.routes_pulled_BG = pull(self.fixed.routes.table_G, group, taken, self.rank, both_T, self.barrier)
        group.slots_Tk.copy_(torch.where(taken_T[:, None], both_T[:, :k], -1))
        group.weights_Tk.copy_(both_T[:, k:].view(torch.float32))
        return taken

    def _pull_and_answer(self) -> None:
        """The rows lie beside the routes, behind the same barrier."""
        self._routes()
        served = serve(self.group, self.rank, self.dedup)
        rows_PH = self.y.new_empty(len(served.list_P), self.spec.hidden)
        self.rows_pulled_BG = pull(self.fixed.rows.table_G, self.group, served, self.rank, rows_PH)
        self.served_S = answer(self.group, served, self.rank, rows_PH, self.layer.weights, self.answers_AH)

    def _combine(self) -> None:
        out = self.y if self.spec.flow == "dp" else self.done_NH
        self.back_BG = combine(self.fixed.answers.table_G, self.group, self.rank, out, self.dedup, self.barrier)

    def _all_rows(self) -> None:
        taken = self._routes()
        rows_TH = self.y.new_empty(taken.entries, self.spec.hidden)
        self.rows_pulled_BG = pull(self.fixed.rows.table_G, self.group, taken, self.rank, rows_TH)
        self._answer_all(rows_TH)

    def _answer_all(self, rows_TH: Tensor) -> None:
        """What this rank's experts say of each token of the group, zero where they say nothing."""
        self.answers_AH.zero_()
        served = replace(serve_tokens(self.group, self.rank), row_T=self.group.plan.perm_T)
        self.served_S = answer(self.group, served, self.rank, rows_TH, self.layer.weights, self.answers_AH)

    def _sum_home(self) -> None:
        self.back_BG = self._srs(self.answers_AH, self.fixed.answers.table_G, self.y)

    def _gather(self) -> None:
        ids = CarriedIds(self.fixed.ids.table_G, self.ids_Tk) if self.spec.carry_expert_ids else None
        table = self.fixed.done.table_G
        _, self.gathered_BG = launch_sag(table, self.done_NH, self.plan, self.rank, self.y, self.barrier, ids=ids)

    def _sum_inputs(self) -> None:
        self._srs(self.fixed.x.local, self.fixed.x.table_G, self.done_NH)

    def _answer_here(self) -> None:
        rows_TH = torch.empty_like(self.y)
        launch_sag(self.fixed.done.table_G, self.done_NH, self.group.plan, self.rank, rows_TH, self.barrier)
        weights_Tk = self._weights(rows_TH, self.slots)
        self.group.slots_Tk.copy_(self.slots)
        self.group.weights_Tk.copy_(weights_Tk)
        self._answer_all(rows_TH)

    def _sum_answers(self) -> None:
        self._srs(self.answers_AH, self.fixed.answers.table_G, self.done_NH)

    def _gather_answers(self) -> None:
        launch_sag(self.fixed.done.table_G, self.done_NH, self.group.plan, self.rank, self.y, self.barrier)

    def _srs(self, like: Tensor, table_G: Tensor, out_NH: Tensor) -> Tensor:
        """Rows pulled from each rank, every token to its home."""
        return launch_srs(table_G, like, self.group.plan, self.rank, out_NH=out_NH, barrier=self.barrier)[1]

    # What has to stand before the first launch.

    def _make_inputs(self) -> None:
        dp, k = self.spec.flow == "dp", self.spec.top_k

        def integers(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=self.device)

        self.slots = integers(self.shape.rows if dp else self.shape.tokens, k)
        self.owner_T, self.counts_G = integers(self.shape.tokens), integers(self.ranks)
        self.token_T, self.chain_row_T = integers(self.shape.tokens), integers(self.shape.tokens)
        self.ids_Tk = integers(self.shape.tokens, k, dtype=torch.int16)
        self._place_N = torch.arange(self.shape.rows, device=self.device)
        self.filled = 0

    def _make_group(self) -> None:
        """The group's tokens by number; their routes and counts are written by the phases."""
        token_T = torch.arange(
            self.shape.tokens if self.replicated else self.ranks * self.shape.rows, device=self.device
        )
        starts_G = torch.arange(self.ranks, device=self.device) * self.shape.rows
        counts_G = self.counts_G
        if self.replicated:  # homes of an even split, for the two halves of an all-reduce
            counts_G = (self.shape.tokens - starts_G).clamp(0, self.shape.rows)
        owner_T = torch.div(token_T, self.shape.rows, rounding_mode="floor")
        plan = TokenRanking(token_T, token_T - owner_T * self.shape.rows, owner_T, counts_G, starts_G)
        slots_Tk = torch.full((len(token_T), self.spec.top_k), -1, dtype=torch.int32, device=self.device)
        weights_Tk = torch.zeros(len(token_T), self.spec.top_k, device=self.device)
        self.group = Group(plan, slots_Tk, weights_Tk, self.layer.slots_per_rank, self.ranks)
        self._limit_1 = torch.full((1,), len(token_T), device=self.device)


def _total(counted_BG: Tensor) -> list[int]:
    """Counts of all blocks of a launch, on the host."""
    return counted_BG.sum(dim=0).tolist()
