"""What one rank keeps of the requests of its queue while a whole model serves them: inputs and KV caches.

In dp every rank has a queue and all heads; in the tp flows all ranks work on one queue, each with its heads and their KV.

Letters: n tokens of this rank in the step, N entries (or query heads, in TinyAttention), K key-value heads, D head size,
S positions of a request.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from semmoe.serving import Request, StepPlan

from ..blocks.head_shard import HeadShard, elements
from ..models import tiny
from ..models.tiny import Layer, TinyModel, rotary_tables, rotate


@dataclass(eq=False)
class Sequence:
    """A request in progress. tokens_S: its inputs, of which `known` are decided; caches [L, K, S, D] of own heads."""

    tokens_S: Tensor
    known: int
    key_LKSD: Tensor
    value_LKSD: Tensor


@dataclass(frozen=True, eq=False)
class Entry:
    """Tokens start..end of a sequence, rows `part` of this rank's batch. mask_TS: what a chunk that continues may see."""

    request: int
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


class TinyAttention:
    """The tiny model but for its MoE layers, over the entries of one queue, each with its own cache.

    shard: this rank's heads in a tp flow, whose output is its part of a sum over ranks; None: all heads (dp)."""

    def __init__(self, model: TinyModel, positions: int, shard: HeadShard | None = None) -> None:
        self.model, self.config, self.shard = model, model.config, shard
        self.layers = [cast(Layer, layer) for layer in model.layers]
        self._projections = [_projections(layer.attention, shard) for layer in self.layers]
        self._kv_heads = shard.num_kv_heads if shard else model.config.num_kv_heads
        dtype = model.embed_VH.dtype
        self.cos_SD, self.sin_SD = (table.to(dtype) for table in rotary_tables(self.config, 0, positions))
        self.dtype = dtype

    def embed(self, batch: Batch) -> Tensor:
        return functional.embedding(batch.token_n, self.model.embed_VH)

    def head(self, x_nH: Tensor, batch: Batch) -> Tensor:
        """logits_NV of the last token of each entry."""
        last_N = torch.tensor([entry.part.stop - 1 for entry in batch.entries], dtype=torch.int64)
        return functional.linear(self.model.norm(x_nH[last_N]), self.model.embed_VH)

    def new_sequence(self, tokens_S: Tensor, known: int) -> Sequence:
        config = self.config
        shape = (config.num_layers, self._kv_heads, len(tokens_S), config.head_dim)
        return Sequence(tokens_S, known, *(torch.empty(shape, dtype=self.dtype) for _ in range(2)))

    def block(self, layer: int, x_nH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(residual stream, what the MoE layer gets): in dp x + attention(norm(x)) and that normalised; with a share of the
        heads x itself and their part of the attention's output."""
        part_nH = self._attend(layer, x_nH, batch)
        if self.shard is not None:
            return x_nH, part_nH
        x_nH = x_nH + part_nH
        return x_nH, self.layers[layer].post_attention_norm(x_nH)

    def _attend(self, layer: int, x_nH: Tensor, batch: Batch) -> Tensor:
        """Attention of own heads, projected; their new keys and values are kept."""
        norm, attention = self.layers[layer].input_norm, self.layers[layer].attention
        q_OH, k_OH, v_OH, o_HO = self._projections[layer]
        heads = (len(x_nH), -1, self.config.head_dim)
        tables = self.cos_SD[batch.position_n, None], self.sin_SD[batch.position_n, None]
        rows_nH = norm(x_nH)
        query_nND = rotate(attention.q_norm(functional.linear(rows_nH, q_OH).view(heads)), *tables)
        key_nKD = rotate(attention.k_norm(functional.linear(rows_nH, k_OH).view(heads)), *tables)
        value_nKD = functional.linear(rows_nH, v_OH).view(heads)
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
        return functional.linear(out_nND.flatten(1), o_HO)


def _projections(attention: tiny.Attention, shard: HeadShard | None) -> list[Tensor]:
    """q, k, v [heads * D, H] and o [H, heads * D] of own heads."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    q_OH, k_OH, v_OH, o_HO = (projection.weight.detach() for projection in projections)
    if shard is None:
        return [q_OH, k_OH, v_OH, o_HO]
    heads, kv = (elements(own, shard.model.head_dim) for own in (shard.heads, shard.kv_heads))
    return [q_OH[heads], k_OH[kv], v_OH[kv], o_HO[:, heads].contiguous()]


class OwnRequests:
    """Sequences of the requests of `queue`, made when a plan first names them, forgotten after their last token.

    greedy: output tokens are those sampled here; else all inputs are the trace's (token_id_T, from Request.token_start).
    """

    def __init__(
        self, queue: int, attention: TinyAttention, requests: Several[Request], token_id_T: Tensor, greedy: bool
    ) -> None:
        self.queue, self.attention, self.requests = queue, attention, requests
        self.token_id_T, self.greedy = token_id_T, greedy
        self.sequences: dict[int, Sequence] = {}

    def batch(self, plan: StepPlan) -> Batch:
        """The queue's entries of a step."""
        first_N = np.cumsum(plan.count_N) - plan.count_N
        entries: list[Entry] = []
        rows, size = [np.zeros(0, dtype=np.int64)], 0
        for i in np.flatnonzero(plan.rank_N == self.queue):
            request, start, count = int(plan.request_N[i]), int(plan.start_N[i]), int(plan.count_N[i])
            if request not in self.sequences:
                self.sequences[request] = self._new_sequence(request)
            end = start + count
            mask = torch.ones(count, end, dtype=torch.bool).tril(start) if start and count > 1 else None
            entries.append(Entry(request, self.sequences[request], slice(size, size + count), start, end, mask))
            rows.append(first_N[i] + np.arange(count))
            size += count
        nothing = torch.zeros(0, dtype=torch.int64)
        tokens = [entry.sequence.tokens_S[entry.start : entry.end] for entry in entries]
        positions = [torch.arange(entry.start, entry.end) for entry in entries]
        return Batch(entries, np.concatenate(rows), torch.cat([nothing, *tokens]), torch.cat([nothing, *positions]))

    def sampled(self, batch: Batch, logits_NV: Tensor) -> None:
        """Decide the next inputs of greedy sequences (a recomputed one keeps its own) and forget those that ended."""
        for entry, best in zip(batch.entries, logits_NV.argmax(dim=-1).tolist(), strict=True):
            sequence = entry.sequence
            if entry.end == len(sequence.tokens_S):
                del self.sequences[entry.request]
            elif entry.end == sequence.known:
                sequence.tokens_S[entry.end] = best
                sequence.known += 1

    def _new_sequence(self, request: int) -> Sequence:
        asked = self.requests[request]
        inputs = asked.prompt_len + asked.output_len - 1  # the last output token is never fed back
        tokens_S = self.token_id_T[torch.from_numpy(asked.rows(inputs))]
        return self.attention.new_sequence(tokens_S, asked.prompt_len if self.greedy else inputs)
