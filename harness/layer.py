"""MoELayer: one rank's part of one MoE layer, in every flow and with every dispatcher.

    dp             gate -> dispatch -> experts -> combine
    tp_replicated  all-reduce -> gate -> local experts -> all-reduce
    tp_scattered   reduce-scatter -> gate -> dispatch -> experts -> combine -> all-gather
    tp_shuffled    SRS -> gate -> dispatch -> experts -> combine -> SAG

`forward` is collective: all ranks call it together, each with its own input:

    dp          x_nH: this rank's n tokens; routes of those tokens. Returns [n, H].
    tp_*        x_TH: this rank's partial sums of all T tokens in original order; routes of all T tokens, the same on
                every rank; homes_T: the home of each token (tp_scattered and tp_shuffled), or what gives it, as part of the
                layer. Returns [T, H], equal on all ranks.
                returns_T (tp_shuffled with a2a_dedup): where each token's outputs are summed, if not at its home.

Phases go to `timer` (harness.timing.PHASES; the all-reduces of tp_replicated count as "srs" and "sag"), counts to
`transport.counter`. Call `timer.reset()` and `transport.counter.reset()` before a step; afterwards `timer.laps_ns` has
one entry a layer and `counting.gather_traffic(transport)` gives the step's Traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.planning import ReplicaRouter
from semmoe.schedule.priced import priced_owners

from .dispatchers import Work, local_work, make_dispatcher
from .reference.experts import run_experts
from .reference.gate import Gating
from .reference.shuffle import rms_norm
from .rehoming import combine_elsewhere, serving
from .slot_gate import Routes, SlotGate
from .timing import PhaseTimer
from .transport.base import Transport
from .transport.codec import torch_dtype
from .transport.plan import HomeScores, ShufflePlan
from .weights import RankWeights, WeightSource, rank_weights

if TYPE_CHECKING:
    from .device.layer_kernels import LayerKernels

Homes = NDArray[np.integer] | ShufflePlan | HomeScores


@dataclass(frozen=True, eq=False)
class LayerOutput:
    """y: [n, H] in dp, else [T, H]. route_flips: choices of this rank's tokens that the gate would not have made (None
    without routes). carried_slots_Tk: the slots of every token, where the spec carries expert ids beside the SAG."""

    y: Tensor
    route_flips: int | None = None
    carried_slots_Tk: Tensor | None = None


@dataclass(frozen=True, eq=False)
class InBlock:
    """What a layer does besides, inside a transformer block.

    residual_TH (tp flows): replicated rows, added to the summed input. norm_H (tp flows): weight of the RMSNorm between
    attention and experts; the layer then returns the residual stream: summed input + residual + what its experts make of
    that, normalised. shared: the shared experts, rows in, rows out, of the rows that the gate sees; in tp_replicated this
    rank's share of a sum over ranks."""

    residual_TH: Tensor | None = None
    norm_H: Tensor | None = None
    shared: Callable[[Tensor], Tensor] | None = None


ALONE = InBlock()


class MoELayer:
    """Layer `layer` (0-based over MoE layers) of a model whose experts stand as `placement` says.

    router: which copy of an expert serves a token, where the gate decides and experts have replicas.
    max_tokens: the most tokens of one rank in a step; only low_latency needs it.
    """

    def __init__(
        self,
        transport: Transport,
        spec: DispatchSpec,
        placement: Placement,
        layer: int,
        weights: RankWeights,
        gating: Gating,
        timer: PhaseTimer | None = None,
        router: ReplicaRouter | None = None,
        max_tokens: int = 128,
    ) -> None:
        if placement.ep_size != transport.ranks:
            raise UserError(f"placement for ep_size={placement.ep_size} on {transport.ranks} ranks")
        if gating.top_k != spec.top_k:
            raise UserError(f"gate of top_k={gating.top_k} with a dispatch spec of top_k={spec.top_k}")
        if weights.gate_EH.shape[1] != spec.hidden:
            raise UserError(
                f"weights of hidden={weights.gate_EH.shape[1]} with a dispatch spec of hidden={spec.hidden}"
            )
        self.transport, self.spec, self.placement, self.layer = transport, spec, placement, layer
        self.weights = weights
        self.timer = timer or PhaseTimer()
        self.dtype = torch_dtype(spec.activation_dtype)
        self.slots_per_rank = placement.slots_per_rank
        self.gate = SlotGate(gating, placement, layer, weights.gate_EH, weights.gate_bias_E, router)
        dispatched = spec.flow != "tp_replicated"
        self._dispatcher = make_dispatcher(spec, transport, self.slots_per_rank, max_tokens) if dispatched else None
        self.kernels = _kernels(spec, transport, self.slots_per_rank)
        if self.kernels is not None and weights.biases is not None:
            raise UserError("the kernels compute experts without biases; set transport.kernels=torch for this model")

    def forward(
        self,
        x: Tensor,
        routes: Routes | None = None,
        homes_T: Homes | Callable[[], Homes] | None = None,
        counts_G: Sequence[int] | None = None,
        returns_T: NDArray[np.integer] | None = None,
        block: InBlock = ALONE,
    ) -> LayerOutput:
        """One pass. counts_G (dp): the tokens of every rank, where the caller knows them; only allgather_rs would
        otherwise have to exchange them."""
        self.transport.counter.start_layer()
        self.timer.start_layer()
        if self.spec.flow == "dp":
            self.transport.counter.now.homes = len(x)
            y_nH, flips, _ = self._moe(x, routes, counts_G)
            return LayerOutput(self._with_shared(y_nH, x, block), flips)
        self.transport.counter.now.tokens = len(x)
        if self.spec.flow == "tp_replicated":
            return self._replicated(x, routes, block)
        if homes_T is None:
            raise UserError(f"flow {self.spec.flow} needs the home of every token")
        return self._scattered(x, routes, homes_T, returns_T, block)

    def _scattered(
        self,
        x_TH: Tensor,
        routes: Routes | None,
        homes_T: Homes | Callable[[], Homes],
        returns_T: NDArray[np.integer] | None,
        block: InBlock,
    ) -> LayerOutput:
        before, after = ("srs", "sag") if self.spec.flow == "tp_shuffled" else ("reduce_scatter", "all_gather")
        transport, timer = self.transport, self.timer
        plan = self._plan(homes_T() if callable(homes_T) else homes_T, x_TH.device)
        mine_n = plan.mine_T(transport.rank)
        timer.lap("plan")
        if block.norm_H is None:
            rows_nH = sums_nH = transport.srs(x_TH, plan, block.residual_TH, op=before)
        else:
            sums_nH, rows_nH = transport.srs_norm(x_TH, plan, block.residual_TH, block.norm_H, op=before)
        transport.counter.now.homes = len(rows_nH)
        timer.lap("srs")
        own = None if routes is None else routes.of(mine_n)
        timer.lap("permute")
        if returns_T is not None:
            if block.norm_H is not None or block.shared is not None:
                raise UserError(
                    "a token scheduler that re-homes moves outputs, not residual rows: scope=moe_layers only"
                )
            return self._rehomed(rows_nH, own, plan, ShufflePlan.from_homes(returns_T, transport.ranks, x_TH.device))
        y_nH, flips, slots_nk = self._moe(rows_nH, own, plan.counts_G)
        y_nH = self._with_shared(y_nH, rows_nH, block)
        if block.norm_H is not None:
            y_nH = sums_nH + y_nH
        carried = None
        if self.spec.carry_expert_ids:
            y_TH, ids_Tk = transport.sag_with_ids(y_nH, slots_nk.to(torch.int16), plan, after)
            carried = ids_Tk.long()
        else:
            y_TH = transport.sag(y_nH, plan, after)
        timer.lap("sag")
        return LayerOutput(y_TH, flips, carried)

    def _plan(self, homes_T: Homes, device: torch.device) -> ShufflePlan:
        if isinstance(homes_T, ShufflePlan):
            return homes_T
        if self.kernels is not None:
            return self.kernels.plan(homes_T, self.transport.ranks, device)
        if isinstance(homes_T, HomeScores):
            homes_T = priced_owners(homes_T.score_TG.cpu().numpy(), homes_T.capacity)
        return ShufflePlan.from_homes(homes_T, self.transport.ranks, device)

    def _rehomed(self, rows_nH: Tensor, own: Routes | None, plan: ShufflePlan, returns: ShufflePlan) -> LayerOutput:
        """tp_shuffled from the gate on, the combine going to new homes: expert ids first, SAG from the new homes."""
        transport, timer = self.transport, self.timer
        if self.spec.dispatcher != "a2a_dedup" or own is None or not own.forced:
            raise UserError("re-homing in the combine needs dispatcher=a2a_dedup and forced routes")
        if self.kernels is not None and self.kernels.exchange is not None:
            raise UserError(
                "the exchange kernels send outputs back home only; re-home over transport=collective or shared"
            )
        assert self._dispatcher is not None
        slots_nk, weights_nk, flips = self.gate.route(rows_nH, own, home=transport.rank)
        timer.lap("gate")
        carried_Tk = transport.sag(slots_nk.to(torch.int16), plan, op="expert_ids").long()
        timer.lap("sag")
        work = self._dispatcher.dispatch(rows_nH, slots_nk, weights_nk, plan.counts_G, timer)
        out_RH = self._run_experts(work)
        serves_TG = serving(carried_Tk, self.slots_per_rank, transport.ranks)
        y_nH = combine_elsewhere(out_RH, plan, returns, serves_TG, transport, self.spec, timer)
        y_TH = transport.sag(y_nH, returns, op="sag")
        timer.lap("sag")
        return LayerOutput(y_TH, flips, carried_Tk)

    def _replicated(self, x_TH: Tensor, routes: Routes | None, block: InBlock) -> LayerOutput:
        timer = self.timer
        rows_TH = self.transport.all_reduce(x_TH)
        rows_TH = sums_TH = rows_TH if block.residual_TH is None else rows_TH + block.residual_TH
        if block.norm_H is not None:
            rows_TH = rms_norm(sums_TH, block.norm_H)
        timer.lap("srs")
        slots_Tk, weights_Tk, flips = self.gate.route(rows_TH, routes, home=-1)
        timer.lap("gate")
        work, _ = local_work(rows_TH, slots_Tk, weights_Tk, self.slots_per_rank, self.transport.rank)
        timer.lap("permute")
        out_TH = self._with_shared(self._run_experts(work).to(self.dtype), rows_TH, block)
        y_TH = self.transport.all_reduce(out_TH)
        y_TH = y_TH if block.norm_H is None else sums_TH + y_TH
        timer.lap("sag")
        return LayerOutput(y_TH, flips)

    def _with_shared(self, y: Tensor, rows: Tensor, block: InBlock) -> Tensor:
        """Outputs of routed and shared experts, the latter of no phase."""
        if block.shared is None:
            return y
        y = y + block.shared(rows)
        self.timer.skip()
        return y

    def _moe(
        self, x_nH: Tensor, routes: Routes | None, counts_G: Sequence[int] | None
    ) -> tuple[Tensor, int | None, Tensor]:
        """Gate, dispatch, experts, combine of the tokens at home here."""
        assert self._dispatcher is not None
        slots_nk, weights_nk, flips = self.gate.route(x_nH, routes, home=self.transport.rank)
        self.timer.lap("gate")
        if self.kernels is not None and self.kernels.exchange is not None:
            y_nH = self.kernels.exchange.forward(x_nH, slots_nk, weights_nk, self.weights, self.timer)
            return y_nH, flips, slots_nk
        work = self._dispatcher.dispatch(x_nH, slots_nk, weights_nk, counts_G, self.timer)
        return self._dispatcher.combine(self._run_experts(work), self.timer), flips, slots_nk

    def _run_experts(self, work: Work) -> Tensor:
        """fp32 [num_rows, H]: the weighted sum of the experts' outputs for each row."""
        counts_S = torch.bincount(work.slot_A, minlength=self.slots_per_rank)
        w13_S2FH, w2_SHF = self.weights.w13_S2FH, self.weights.w2_SHF
        if self.kernels is not None:  # sorts by itself, and answers in the order of the assignments
            row_A, weight_A = work.row_A, work.weight_A
            out_AH = self.kernels.experts(work.rows_RH, row_A, work.slot_A, w13_S2FH, w2_SHF)
        else:
            order_A = work.slot_A.argsort(stable=True)
            row_A, weight_A = work.row_A[order_A], work.weight_A[order_A]
            rows_AH = work.rows_RH.index_select(0, row_A)
            self.timer.lap("permute")
            out_AH = run_experts(rows_AH, counts_S, w13_S2FH, w2_SHF, self.weights.biases)
        now = self.transport.counter.now
        now.expert_rows, now.active_experts = len(out_AH), int((counts_S > 0).sum())
        self.timer.lap("experts")
        weighted_AH = out_AH.float() * weight_A[:, None]
        out_RH = torch.zeros(work.num_rows, out_AH.shape[1], dtype=torch.float32, device=out_AH.device)
        out_RH.index_add_(0, row_A, weighted_AH)
        self.timer.lap("permute")
        return out_RH


def build_layers(
    transport: Transport,
    spec: DispatchSpec,
    placement: Placement,
    source: WeightSource,
    gating: Gating,
    timer: PhaseTimer | None = None,
    router: ReplicaRouter | None = None,
    max_tokens: int = 128,
    layers: Sequence[int] | None = None,
) -> list[MoELayer]:
    """This rank's MoELayer for every MoE layer (or those in `layers`), sharing one timer."""
    timer = timer or PhaseTimer()
    device = getattr(transport, "device", "cpu")
    dtype = torch_dtype(spec.activation_dtype)
    return [
        MoELayer(
            transport,
            spec,
            placement,
            layer,
            rank_weights(source, placement, layer, transport.rank, dtype, device),
            gating,
            timer,
            router,
            max_tokens,
        )
        for layer in (range(placement.num_layers) if layers is None else layers)
    ]


def _kernels(spec: DispatchSpec, transport: Transport, slots_per_rank: int) -> LayerKernels | None:
    """The Triton kernels where the transport asks for them; only then Triton is imported."""
    if transport.kernel_path != "triton":
        return None
    from .device.layer_kernels import LayerKernels

    return LayerKernels(spec, transport, slots_per_rank)
