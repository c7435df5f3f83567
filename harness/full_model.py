"""The whole forward pass of the tiny model on attention data-parallel ranks: scope=full_model of a served run.

Every rank holds the attention weights and, for the requests of its own queue, their KV caches; MoE layers are shared:

    embed own tokens -> 6 x [ attention of own requests -> MoELayer (all ranks together) ] -> LM head of each entry's last

Input tokens (measure.tokens): "forced", the trace's, and experts too, so that the counted Traffic is that of the trace;
"greedy", the most likely one of the step before, routed by the gate. A rank without tokens takes part in MoE layers only.

Letters: n tokens of this rank in the step, N query heads, K key-value heads, D head size, S positions of a request.
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
from torch.nn import functional

from semmoe.errors import UserError
from semmoe.planning import RoutedStep
from semmoe.run import Run
from semmoe.serving import StepPlan

from .counting import Counter
from .feeds import Feed
from .layer import Routes
from .models.tiny import Layer, TinyConfig, TinyModel, rotary_tables, rotate
from .stack import Stack, StepResult
from .weights import TinyWeights, WeightSource
from .worker import RankContext

TOKENS = ("forced", "greedy")


@dataclass(eq=False)
class Sequence:
    """A request in progress. tokens_S: its inputs, of which `known` are decided; caches [L, K, S, D]."""

    tokens_S: Tensor
    known: int
    key_LKSD: Tensor
    value_LKSD: Tensor


@dataclass(frozen=True, eq=False)
class Entry:
    """Tokens start..end of a sequence, rows `part` of this rank's batch. mask_TS: what a chunk that continues may see."""

    sequence: Sequence
    part: slice
    start: int
    end: int
    mask_TS: Tensor | None


@dataclass(frozen=True, eq=False)
class Batch:
    """What this rank computes in a step; mine_n: which tokens of the step these are."""

    entries: list[Entry]
    mine_n: NDArray[np.int64]
    token_n: Tensor
    position_n: Tensor


@dataclass(frozen=True, eq=False)
class FullStepResult(StepResult):
    """logits_NV: of the last token of each entry of this rank."""

    logits_NV: Tensor = field(default_factory=lambda: torch.empty(0))


class TinyAttention:
    """Attention of the tiny model over the entries of one rank, each with its own cache."""

    def __init__(self, model: TinyModel, positions: int) -> None:
        self.config: TinyConfig = model.config
        self.layers = [cast(Layer, layer) for layer in model.layers]
        dtype = model.embed_VH.dtype
        self.cos_SD, self.sin_SD = (table.to(dtype) for table in rotary_tables(self.config, 0, positions))
        self.dtype = dtype

    def new_sequence(self, tokens_S: Tensor, known: int) -> Sequence:
        config = self.config
        shape = (config.num_layers, config.num_kv_heads, len(tokens_S), config.head_dim)
        return Sequence(tokens_S, known, *(torch.empty(shape, dtype=self.dtype) for _ in range(2)))

    def block(self, layer: int, x_nH: Tensor, batch: Batch) -> Tensor:
        """x + attention(norm(x)); the new keys and values are kept."""
        norm, attention = self.layers[layer].input_norm, self.layers[layer].attention
        heads = (len(x_nH), -1, self.config.head_dim)
        tables = self.cos_SD[batch.position_n, None], self.sin_SD[batch.position_n, None]
        rows_nH = norm(x_nH)
        query_nND = rotate(attention.q_norm(attention.q_proj(rows_nH).view(heads)), *tables)
        key_nKD = rotate(attention.k_norm(attention.k_proj(rows_nH).view(heads)), *tables)
        value_nKD = attention.v_proj(rows_nH).view(heads)
        out_nND = torch.empty_like(query_nND)
        for entry in batch.entries:
            sequence, part = entry.sequence, entry.part
            sequence.key_LKSD[layer, :, entry.start : entry.end] = key_nKD[part].transpose(0, 1)
            sequence.value_LKSD[layer, :, entry.start : entry.end] = value_nKD[part].transpose(0, 1)
            out = functional.scaled_dot_product_attention(
                query_nND[part].transpose(0, 1)[None],
                sequence.key_LKSD[layer, None, :, : entry.end],
                sequence.value_LKSD[layer, None, :, : entry.end],
                attn_mask=entry.mask_TS,
                is_causal=entry.start == 0 and entry.end > 1,
                enable_gqa=True,
            )
            out_nND[part] = out[0].transpose(0, 1)
        return x_nH + attention.o_proj(out_nND.flatten(1))


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
        self.model = cast(TinySource, self.feed).tiny.model.to(self.dtype)
        requests, trace = run.workload.requests, run.heldout
        self.greedy = run.cfg["measure"]["tokens"] == "greedy"
        self.requests, self._token_id_T = requests, torch.from_numpy(trace.token_id_T.astype(np.int64))
        self.attention = TinyAttention(self.model, max(r.prompt_len + r.output_len for r in requests))
        self.sequences: dict[int, Sequence] = {}

    def make_feed(self) -> Feed:
        return TinySource()

    @torch.no_grad()
    def step(self, plan: StepPlan, routed: RoutedStep) -> FullStepResult:
        """One forward pass of this rank's entries, together with all other ranks'."""
        self.timer.reset()
        self.transport.counter.reset()
        attention_ns, layer_ns = [], []
        dist.barrier()
        begin = perf_counter_ns()
        batch = self._batch(plan)
        slots_nLk = None if self.greedy else torch.from_numpy(routed.slots_TLk[batch.mine_n].astype(np.int64))
        x_nH = functional.embedding(batch.token_n, self.model.embed_VH)
        for layer, moe in enumerate(self.layers):
            start = perf_counter_ns()
            rows_nH = x_nH
            if batch.entries:
                x_nH = self.attention.block(layer, x_nH, batch)
                rows_nH = self.attention.layers[layer].post_attention_norm(x_nH)
            middle = perf_counter_ns()
            x_nH = x_nH + moe.forward(rows_nH, None if slots_nLk is None else Routes(slots_nLk[:, layer])).y
            attention_ns.append(middle - start)
            layer_ns.append(perf_counter_ns() - middle)
        logits_NV = self.head(x_nH, batch)
        self._sample(plan, batch, logits_NV)
        step_ns = perf_counter_ns() - begin
        counter = self.transport.counter
        kept = Counter(counter.rank, counter.ranks, counter.layers)
        return FullStepResult(layer_ns, self.timer.laps_ns, step_ns, kept, attention_ns, logits_NV)

    def head(self, x_nH: Tensor, batch: Batch) -> Tensor:
        """Logits of the last token of each entry."""
        last_N = torch.tensor([entry.part.stop - 1 for entry in batch.entries], dtype=torch.int64)
        return functional.linear(self.model.norm(x_nH[last_N]), self.model.embed_VH)

    def _batch(self, plan: StepPlan) -> Batch:
        mine_N = np.flatnonzero(plan.rank_N == self.context.rank)
        first_N = np.cumsum(plan.count_N) - plan.count_N
        entries: list[Entry] = []
        rows, size = [np.zeros(0, dtype=np.int64)], 0
        for i in mine_N:
            request, start, count = int(plan.request_N[i]), int(plan.start_N[i]), int(plan.count_N[i])
            sequence = self.sequences.get(request)
            if sequence is None:
                sequence = self.sequences[request] = self._new_sequence(request)
            end = start + count
            mask = torch.ones(count, end, dtype=torch.bool).tril(start) if start and count > 1 else None
            entries.append(Entry(sequence, slice(size, size + count), start, end, mask))
            rows.append(first_N[i] + np.arange(count))
            size += count
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = [entry.sequence.tokens_S[entry.start : entry.end] for entry in entries]
        positions = [torch.arange(entry.start, entry.end) for entry in entries]
        return Batch(entries, np.concatenate(rows), torch.cat([nothing, *tokens]), torch.cat([nothing, *positions]))

    def _new_sequence(self, request: int) -> Sequence:
        asked = self.requests[request]
        inputs = asked.prompt_len + asked.output_len - 1  # the last output token is never fed back
        tokens_S = self._token_id_T[asked.token_start : asked.token_start + inputs].clone()
        return self.attention.new_sequence(tokens_S, asked.prompt_len if self.greedy else inputs)

    def _sample(self, plan: StepPlan, batch: Batch, logits_NV: Tensor) -> None:
        """Decide the next inputs of greedy sequences (a recomputed one keeps its own) and forget those that ended."""
        best_N = logits_NV.argmax(dim=-1).tolist()
        mine = plan.request_N[plan.rank_N == self.context.rank].tolist()
        for request, entry, best in zip(mine, batch.entries, best_N, strict=True):
            sequence = entry.sequence
            if entry.end == len(sequence.tokens_S):
                del self.sequences[request]
            elif entry.end == sequence.known:
                sequence.tokens_S[entry.end] = best
                sequence.known += 1


def _check(run: Run) -> None:
    tokens = run.cfg["measure"]["tokens"]
    if tokens not in TOKENS:
        raise UserError(f"measure.tokens='{tokens}' must be one of {', '.join(TOKENS)}")
    if run.spec.flow != "dp":
        raise UserError(f"scope=full_model with flow={run.spec.flow}: the harness runs whole models in flow=dp only")
    config, model, trace = TinyConfig(), run.model, run.heldout
    ours = (config.hidden, config.num_layers, config.num_experts, config.top_k, config.vocab_size)
    theirs = (model.hidden, trace.num_layers, trace.num_experts, trace.top_k, trace.vocab_size)
    if ours != theirs:
        raise UserError(
            "scope=full_model runs the tiny model as it is (hidden, layers, experts, top-k, vocabulary: "
            f"{ours}), but model={model.name} and its trace have {theirs}; use scope=moe_layers"
        )
