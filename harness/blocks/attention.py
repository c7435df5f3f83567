"""One attention block of a rank's heads, grouped-query or latent (MLA), over the sequences of a step.

    rows [n, H] (normalised) -> projections, rotary positions -> caches -> softmax(q k) v -> output projection [n, H]

With all heads that is the block's output; with a share of them, this rank's partial sum of it. Sequences of one length and
start are computed together. MLA keeps one latent row a token: a prefill expands it to keys and values of every head, a
decode stays in latent space and lets all heads read the row as if it were one key-value head (projections absorbed).

Letters: n rows, B sequences of a group, c new tokens of each, S positions, N heads, K key-value heads, D head size, R rotary
part, C latent row, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semmoe.serving.stepplan import StepPlan

from ..models.tiny import rotary, rotate
from ..reference.shuffle import rms_norm
from .head_shard import HeadShard, elements
from .weights import BlockWeights

ROPE_THETA = 10_000.0


@dataclass(frozen=True, eq=False)
class Group:
    """Neighbouring sequences first..first+sequences of a queue: `count` tokens of each, from position `start` on, rows
    `part` of the batch."""

    first: int
    sequences: int
    start: int
    count: int
    part: slice

    @property
    def end(self) -> int:
        return self.start + self.count

    def mask(self, device: torch.device) -> Tensor | None:
        """[c, end] where a chunk continues; the causal mask of a chunk that begins is the kernel's own."""
        if not self.start or self.count == 1:
            return None
        return torch.ones(self.count, self.end, dtype=torch.bool, device=device).tril(self.start)


@dataclass(frozen=True, eq=False)
class Sequences:
    """What one queue computes in a step; position_n: of every row."""

    groups: list[Group]
    position_n: Tensor

    @classmethod
    def of(cls, plan: StepPlan, queue: int, device: torch.device | str = "cpu") -> Sequences:
        own = np.flatnonzero(plan.rank_N == queue)
        entries = list(zip(plan.start_N[own].tolist(), plan.count_N[own].tolist(), strict=True))
        groups, sequence, row = list[Group](), 0, 0
        for (start, count), alike in groupby(entries):
            many = len(list(alike))
            groups.append(Group(sequence, many, start, count, slice(row, row + many * count)))
            sequence, row = sequence + many, row + many * count
        parts = [torch.arange(g.start, g.end).repeat(g.sequences) for g in groups]
        return cls(groups, torch.cat([torch.zeros(0, dtype=torch.int64), *parts]).to(device))

    @property
    def last_B(self) -> Tensor:
        """Rows of the last tokens of the sequences."""
        rows = [torch.arange(g.part.start + g.count - 1, g.part.stop, g.count) for g in self.groups]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *rows]).to(self.position_n.device)


class Attention(Protocol):
    """One block's. Caches hold what earlier steps left there; the new tokens of this one are written behind it."""

    def __call__(self, rows_nH: Tensor, sequences: Sequences) -> Tensor: ...


@dataclass(frozen=True)
class Caches:
    """What a block keeps keys and values for: at most so many sequences of a queue, of so many positions each."""

    queue: int
    most_sequences: int
    positions: int


def make_attention(
    weights: BlockWeights,
    layer: int,
    shard: HeadShard,
    caches: Caches,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Attention:
    """The attention of decoder layer `layer` with the heads of `shard`."""
    kind = GroupedQuery if weights.model.attention == "gqa" else Latent
    return kind(weights, layer, shard, caches, dtype, device)


class GroupedQuery:
    def __init__(
        self,
        weights: BlockWeights,
        layer: int,
        shard: HeadShard,
        caches: Caches,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        model, size = weights.model, weights.model.head_dim
        full = weights.gqa(layer)
        heads, kv = elements(shard.heads, size), elements(shard.kv_heads, size)
        qkv = torch.cat([full["q"][heads], full["k"][kv], full["v"][kv]])
        self.qkv_OH, self.o_HO = qkv.to(device, dtype), full["o"][:, heads].contiguous().to(device, dtype)
        self.shard, self.size = shard, size
        self.tables = _tables(size, caches.positions, dtype, device)
        shape = (2, caches.most_sequences, model.num_kv_heads, caches.positions, size)
        own = weights.cache(layer, caches.queue, shape)[:, :, shard.kv_heads]
        self.key_BKSD, self.value_BKSD = own.to(device, dtype).contiguous()

    def __call__(self, rows_nH: Tensor, sequences: Sequences) -> Tensor:
        heads, kv, size = self.shard.num_heads, self.shard.num_kv_heads, self.size
        packed = functional.linear(rows_nH, self.qkv_OH).view(len(rows_nH), heads + 2 * kv, size)
        query_nND, key_nKD, value_nKD = packed.split([heads, kv, kv], dim=1)
        turns = [table[sequences.position_n, None] for table in self.tables]
        query_nND, key_nKD = rotate(query_nND, *turns), rotate(key_nKD, *turns)
        out_nND = torch.empty_like(query_nND)
        for g in sequences.groups:
            shape = (g.sequences, g.count, -1, size)
            own = slice(g.first, g.first + g.sequences)
            keys, values = self.key_BKSD[own, :, : g.end], self.value_BKSD[own, :, : g.end]
            keys[:, :, g.start :] = key_nKD[g.part].view(shape).transpose(1, 2)
            values[:, :, g.start :] = value_nKD[g.part].view(shape).transpose(1, 2)
            out = functional.scaled_dot_product_attention(
                query_nND[g.part].view(shape).transpose(1, 2),
                keys,
                values,
                attn_mask=g.mask(keys.device),
                is_causal=not g.start and g.count > 1,
                enable_gqa=heads != kv,
            )
            out_nND[g.part] = out.transpose(1, 2).reshape(-1, heads, size)
        return functional.linear(out_nND.flatten(1), self.o_HO)


class Latent:
    def __init__(
        self,
        weights: BlockWeights,
        layer: int,
        shard: HeadShard,
        caches: Caches,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shard, self.model = shard, weights.model
        model = self.model
        full = {name: tensor.to(device, dtype) for name, tensor in weights.mla(layer).items()}
        query = model.head_dim + model.rope_head_dim
        self.q_down_QH, self.q_norm_Q = full.get("q_down"), full.get("q_norm")
        self.q_OH = full["q"][elements(shard.heads, query)].contiguous()
        self.kv_down_OH, self.kv_norm_C = full["kv_down"], full["kv_norm"]
        heads = shard.num_heads
        self.k_up_NDC = full["k_up"][elements(shard.heads, model.head_dim)].reshape(heads, model.head_dim, -1)
        self.v_up_NVC = full["v_up"][elements(shard.heads, model.v_head_dim)].reshape(heads, model.v_head_dim, -1)
        self.o_HO = full["o"][:, elements(shard.heads, model.v_head_dim)].contiguous()
        self.scale = query**-0.5
        self.tables = _tables(model.rope_head_dim, caches.positions, dtype, device)
        shape = (caches.most_sequences, caches.positions, model.kv_lora_rank + model.rope_head_dim)
        self.row_BSO = weights.cache(layer, caches.queue, shape).to(device, dtype)

    def __call__(self, rows_nH: Tensor, sequences: Sequences) -> Tensor:
        model, heads = self.model, self.shard.num_heads
        turns = [table[sequences.position_n] for table in self.tables]
        asked = rows_nH
        if self.q_down_QH is not None and self.q_norm_Q is not None:
            asked = rms_norm(functional.linear(rows_nH, self.q_down_QH), self.q_norm_Q)
        parts = [model.head_dim, model.rope_head_dim]
        query_nNO = functional.linear(asked, self.q_OH).view(len(rows_nH), heads, sum(parts))
        query_nND, turned_nNR = query_nNO.split(parts, dim=2)
        turned_nNR = rotate(turned_nNR, *(table[:, None] for table in turns))
        latent_nC, shared_nR = functional.linear(rows_nH, self.kv_down_OH).split(
            [model.kv_lora_rank, model.rope_head_dim], dim=1
        )
        row_nO = torch.cat([rms_norm(latent_nC, self.kv_norm_C), rotate(shared_nR, *turns)], dim=1)
        out_nNV = rows_nH.new_empty(len(rows_nH), heads, model.v_head_dim)
        for g in sequences.groups:
            rows_BSO = self.row_BSO[g.first : g.first + g.sequences, : g.end]
            rows_BSO[:, g.start :] = row_nO[g.part].view(g.sequences, g.count, -1)
            core = self._decode if g.count == 1 else self._prefill
            out_nNV[g.part] = core(query_nND[g.part], turned_nNR[g.part], rows_BSO, g)
        return functional.linear(out_nNV.flatten(1), self.o_HO)

    def _decode(self, query_BND: Tensor, turned_BNR: Tensor, rows_BSO: Tensor, g: Group) -> Tensor:
        """One token a sequence: its heads are the queries, rows the keys, their latent part the values."""
        latent = self.model.kv_lora_rank
        query_BNO = torch.cat([torch.einsum("bnd,ndc->bnc", query_BND, self.k_up_NDC), turned_BNR], dim=2)
        rows_B1SO = rows_BSO[:, None]
        out_B1NC = functional.scaled_dot_product_attention(
            query_BNO[:, None], rows_B1SO, rows_B1SO[..., :latent], scale=self.scale
        )
        return torch.einsum("bnc,nvc->bnv", out_B1NC[:, 0], self.v_up_NVC)

    def _prefill(self, query_nND: Tensor, turned_nNR: Tensor, rows_BSO: Tensor, g: Group) -> Tensor:
        """Keys and values of every head, expanded from the latent rows."""
        heads = self.shard.num_heads
        latent_BSC, shared_BSR = rows_BSO.split([self.model.kv_lora_rank, self.model.rope_head_dim], dim=2)
        keys_BNSD = torch.einsum("bsc,ndc->bnsd", latent_BSC, self.k_up_NDC)
        values_BNSV = torch.einsum("bsc,nvc->bnsv", latent_BSC, self.v_up_NVC)
        shared_BNSR = shared_BSR[:, None].expand(-1, heads, -1, -1)
        query = torch.cat([query_nND, turned_nNR], dim=2).view(g.sequences, g.count, heads, -1).transpose(1, 2)
        out_BNcV = functional.scaled_dot_product_attention(
            query,
            torch.cat([keys_BNSD, shared_BNSR], dim=3),
            values_BNSV,
            attn_mask=g.mask(query.device),
            is_causal=not g.start,
            scale=self.scale,
        )
        return out_BNcV.transpose(1, 2).reshape(-1, heads, self.model.v_head_dim)


def _tables(size: int, positions: int, dtype: torch.dtype, device: torch.device | str) -> Sequence[Tensor]:
    return [table.to(device, dtype) for table in rotary(size, ROPE_THETA, 0, positions)]
