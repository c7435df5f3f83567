"""The whole forward pass of the tiny model on every rank of a served run: scope=full_model, workload=serve.

    dp     embed own tokens -> 6 x [ attention of own requests -> MoELayer (all ranks together) ] -> LM head of own requests
    tp_*   embed all tokens -> 6 x [ own heads of all requests, a partial sum -> MoELayer ] -> LM head of all requests

In dp a rank keeps the KV caches of the requests of its queue; without tokens it takes part in MoE layers only. In tp flows
it keeps its heads' share of all requests, and the MoELayer sums, adds the residual and normalises on its way, as in
blocks/forward.py. There all ranks end a step with the same rows, bit for bit, so each computes the whole LM head and
decides the same tokens: no collective beyond those of the layers.

Input tokens (measure.tokens): "forced", the trace's, and experts too, so that the counted Traffic is that of the trace;
"greedy", the most likely one of the step before, routed by the gate (homes stay those that tp_shuffled plans for the trace).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.planning import RoutedStep
from semmoe.run import Run
from semmoe.serving import StepPlan

from ..blocks.head_shard import HeadShard
from ..counting import Counter
from ..feeds import Feed
from ..layer import InBlock, Routes
from ..models.tiny import TinyConfig
from ..stack import Stack, StepResult
from ..weights import TinyWeights, WeightSource
from ..worker import RankContext
from .sequences import OwnRequests, TinyAttention

TOKENS = ("forced", "greedy")


@dataclass(frozen=True, eq=False)
class FullStepResult(StepResult):
    """logits_NV: of the last token of each entry of this rank's queue."""

    logits_NV: Tensor = field(default_factory=lambda: torch.empty(0))


class TinySource:
    """Feed of a full model: weights only, hidden states come from the layer before."""

    real = True

    def __init__(self) -> None:
        self.tiny = TinyWeights()
        self.source: WeightSource = self.tiny

    def rows_TH(self, layer: int, rows_T: NDArray[np.int64]) -> Tensor:
        raise NotImplementedError("a full model makes its own hidden states")


class FullModel(Stack):
    """This rank's part of the tiny model: `step(plan, routed)` is collective, one forward pass of a StepPlan."""

    scope = "full_model"

    def __init__(self, context: RankContext, run: Run) -> None:
        _check(run)
        super().__init__(context, run)
        if self.device.type == "cuda":
            raise UserError(
                "workload=serve with scope=full_model is measured on CPU ranks only; set transport=shared, scope=moe_layers "
                "or workload=batches"
            )
        self.model = cast(TinySource, self.feed).tiny.model.to(self.dtype)
        self.greedy = run.cfg["measure"]["tokens"] == "greedy"
        requests, token_id_T = run.workload.requests, torch.from_numpy(run.heldout.token_id_T.astype(np.int64))
        dp = run.spec.flow == "dp"
        shard = None if dp else HeadShard(run.model, context.rank, context.ranks)
        self.attention = TinyAttention(self.model, max(r.prompt_len + r.output_len for r in requests), shard)
        self.own = OwnRequests(context.rank if dp else 0, self.attention, requests, token_id_T, self.greedy)

    def make_feed(self) -> Feed:
        return TinySource()

    @torch.no_grad()
    def step(self, plan: StepPlan, routed: RoutedStep) -> FullStepResult:
        """One forward pass of the entries of this rank's queue, together with all other ranks."""
        self.timer.reset()
        self.transport.counter.reset()
        attention_ns, layer_ns = [], []
        dist.barrier()
        begin = perf_counter_ns()
        batch = self.own.batch(plan)
        slots_nLk = None if self.greedy else torch.from_numpy(routed.slots_TLk[batch.mine_n].astype(np.int64))
        x_nH = self.attention.embed(batch)
        for layer in range(len(self.layers)):
            start = perf_counter_ns()
            stream_nH = rows_nH = x_nH
            if batch.entries:
                stream_nH, rows_nH = self.attention.block(layer, x_nH, batch)
            middle = perf_counter_ns()
            routes = None if slots_nLk is None else Routes(slots_nLk[:, layer])
            x_nH = self._moe(layer, stream_nH, rows_nH, routes, routed)
            attention_ns.append(middle - start)
            layer_ns.append(perf_counter_ns() - middle)
        logits_NV = self.attention.head(x_nH, batch)
        self.own.sampled(batch, logits_NV)
        step_ns = perf_counter_ns() - begin
        counter = self.transport.counter
        kept = Counter(counter.rank, counter.ranks, counter.layers)
        return FullStepResult(layer_ns, self.timer.marks_L, step_ns, kept, attention_ns, logits_NV)

    def _moe(self, layer: int, stream_nH: Tensor, rows_nH: Tensor, routes: Routes | None, routed: RoutedStep) -> Tensor:
        """The residual stream behind a MoE layer."""
        moe = self.layers[layer]
        if self.spec.flow == "dp":
            return stream_nH + moe.forward(rows_nH, routes).y
        homes_T = None if routed.homes_TL is None else np.ascontiguousarray(routed.homes_TL[:, layer])
        norm_H = self.attention.layers[layer].post_attention_norm.weight
        return moe.forward(rows_nH, routes, homes_T, block=InBlock(stream_nH, norm_H)).y


def _check(run: Run) -> None:
    tokens = run.cfg["measure"]["tokens"]
    if tokens not in TOKENS:
        raise UserError(f"measure.tokens='{tokens}' must be one of {', '.join(TOKENS)}")
    config, model, trace = TinyConfig(), run.model, run.heldout
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    ours = (config.hidden, config.num_layers, config.num_experts, config.top_k, config.vocab_size, *heads)
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    theirs = (model.hidden, trace.num_layers, trace.num_experts, trace.top_k, trace.vocab_size, *heads)
    if ours != theirs:
        raise UserError(
            "workload=serve with scope=full_model runs the tiny model as it is (hidden, layers, experts, top-k, vocabulary, "
            f"heads, key-value heads, head size: {ours}), but model={model.name} and its trace have {theirs}; use "
            "scope=moe_layers or workload=batches"
        )
