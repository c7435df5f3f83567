"""A stack of transformer blocks on one rank: attention of the model's shape around the real MoE layers, in every flow.

    dp       x_nH, own tokens:   h = x + attention(norm x), all heads;  x = h + MoELayer(norm h) (+ shared experts)
    tp_*     x_TH, all tokens, the same on every rank:
             a = attention(norm x) of own heads, a partial sum  ->  MoELayer sums it over ranks as its flow does (SRS,
             reduce-scatter, all-reduce), adds the residual x and normalises on the way, and gives the next x (SAG, ...)

Dense layers (DeepSeek's first) stand in for MoE layers where the model has them: all ffn columns in dp; in tp flows a share
of them between two all-reduces. After the last block: final norm and LM head of each sequence's last token, in tp flows of
this rank's share of the vocabulary. Weights are `BlockWeights`; those of experts and gates come with the MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from semmoe.errors import UserError
from semmoe.specs import ModelSpec

from ..layer import InBlock, LayerOutput, MoELayer
from ..reference.shuffle import rms_norm
from ..transport.base import Transport
from .attention import Attention, Caches, Sequences, make_attention
from .head_shard import HeadShard
from .weights import BlockWeights

if TYPE_CHECKING:
    from ..stack import LayerInput

Mark = Callable[[str], None]  # called when "attention", then "dense" or "layer" of a block begins, and at its "end"


@dataclass(frozen=True, eq=False)
class Mlp:
    """A gated feed-forward, or a share of its columns: down(silu(gate x) * up x)."""

    gate_up_2FH: Tensor
    down_HF: Tensor

    @classmethod
    def share(
        cls, full: tuple[Tensor, Tensor, Tensor], rank: int, ranks: int, device: torch.device, dtype: torch.dtype
    ) -> Mlp:
        """Every rank gets about as many columns of (gate, up, down)."""
        gate, up = (matrix.tensor_split(ranks)[rank] for matrix in full[:2])
        down = full[2].tensor_split(ranks, dim=1)[rank]
        return cls(torch.cat([gate, up]).to(device, dtype), down.contiguous().to(device, dtype))

    def __call__(self, rows_nH: Tensor) -> Tensor:
        gate, up = functional.linear(rows_nH, self.gate_up_2FH).chunk(2, dim=1)
        return functional.linear(functional.silu(gate) * up, self.down_HF)


@dataclass(frozen=True, eq=False)
class Block:
    """What one decoder layer holds on a rank. feed_forward: its MoE layer, or a dense one."""

    attention: Attention
    input_norm_H: Tensor
    post_norm_H: Tensor
    feed_forward: MoELayer | Mlp
    shared: Mlp | None = None


class Blocks:
    """All of them. moe_layers: in the order of model.layer_ids. most_sequences, positions: what caches are made for.
    forward: runs a MoE layer as Stack.run_layer does; None: with the homes that it is given. progress: called with (blocks
    made, of how many)."""

    def __init__(
        self,
        transport: Transport,
        model: ModelSpec,
        moe_layers: Sequence[MoELayer],
        most_sequences: int,
        positions: int,
        seed: int = 0,
        forward: Callable[[int, LayerInput, InBlock], LayerOutput] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if len(moe_layers) != model.num_moe_layers:
            raise UserError(f"{len(moe_layers)} MoE layers for {model.name}, which has {model.num_moe_layers}")
        first = moe_layers[0]
        self.transport, self.model, self.flow = transport, model, first.spec.flow
        self.device, self.dtype = first.weights.gate_EH.device, first.dtype
        self.weights = BlockWeights(model, seed)
        self.dp, self.most_sequences = self.flow == "dp", most_sequences
        rank, ranks = transport.rank, transport.ranks
        self.shard = HeadShard(model) if self.dp else HeadShard(model, rank, ranks)
        self._forward = forward or partial(_forward, moe_layers)
        by_id = dict(zip(model.layer_ids, moe_layers, strict=True))
        caches = Caches(rank if self.dp else 0, most_sequences, positions)
        self.blocks = []
        for layer in range(model.num_layers):
            attention = make_attention(self.weights, layer, self.shard, caches, self.dtype, self.device)
            input_norm, post_norm = (self._norm(layer, name) for name in ("input_norm", "post_norm"))
            moe = by_id.get(layer)
            feed_forward = moe or self._mlp(layer, shared=False, split=not self.dp)
            # where each token has one home the shared experts stand whole on every rank; else ranks share their columns
            split = self.flow == "tp_replicated"
            shared = self._mlp(layer, True, split) if moe and model.shared_experts else None
            self.blocks.append(Block(attention, input_norm, post_norm, feed_forward, shared))
            progress(layer + 1, model.num_layers)
        self.final_norm_H = self._norm(model.num_layers, "input_norm")
        head_VH = self.weights.matrix(model.num_layers, "head", model.vocab_size, model.hidden)
        own_VH = head_VH if self.dp else head_VH.tensor_split(ranks)[rank]
        self.head_VH = own_VH.to(self.device, self.dtype)

    def run(
        self, x: Tensor, inputs: Sequence[LayerInput], sequences: Sequences, mark: Mark = lambda what: None
    ) -> Iterator[Tensor]:
        """The residual stream behind every block in turn, [n, H] in dp, else [T, H]. x: before the first. inputs: routes
        and homes of the MoE layers. Collective."""
        moe = iter(enumerate(inputs))
        for block in self.blocks:
            mark("attention")
            stream, rows = self.attend(block, x, sequences)
            if isinstance(block.feed_forward, Mlp):
                mark("dense")
                x = self._dense(block, block.feed_forward, stream, rows)
            else:
                mark("layer")
                x = self._moe(block, stream, rows, *next(moe))
            mark("end")
            yield x

    def attend(self, block: Block, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """(residual stream, what the feed-forward gets): in dp behind the attention and normalised; in tp flows x itself
        and this rank's part of the attention's output."""
        part = block.attention(rms_norm(x, block.input_norm_H), sequences)
        if not self.dp:
            return x, part
        x = x + part
        return x, rms_norm(x, block.post_norm_H)

    def logits(self, x: Tensor, sequences: Sequences) -> Tensor:
        """Of the last token of each own sequence: [B, V], in tp flows this rank's columns of all sequences'."""
        return functional.linear(rms_norm(x[sequences.last_B], self.final_norm_H), self.head_VH)

    def _moe(self, block: Block, stream: Tensor, rows: Tensor, layer: int, given: LayerInput) -> Tensor:
        given = replace(given, x=rows)
        if self.dp:
            return stream + self._forward(layer, given, InBlock(shared=block.shared)).y
        return self._forward(layer, given, InBlock(stream, block.post_norm_H, block.shared)).y

    def _dense(self, block: Block, mlp: Mlp, stream: Tensor, rows: Tensor) -> Tensor:
        if self.dp:
            return stream + mlp(rows)
        with self._uncounted():  # Traffic is that of MoE layers
            sums_TH = stream + self.transport.all_reduce(rows)
            return sums_TH + self.transport.all_reduce(mlp(rms_norm(sums_TH, block.post_norm_H)))

    @contextmanager
    def _uncounted(self):  # type: ignore[no-untyped-def]
        counter = self.transport.counter
        before, counter.enabled = counter.enabled, False
        try:
            yield
        finally:
            counter.enabled = before

    def _norm(self, layer: int, name: str) -> Tensor:
        return self.weights.norm(layer, name, self.model.hidden).to(self.device, self.dtype)

    def _mlp(self, layer: int, shared: bool, split: bool) -> Mlp:
        rank, ranks = (self.transport.rank, self.transport.ranks) if split else (0, 1)
        return Mlp.share(self.weights.mlp(layer, shared), rank, ranks, self.device, self.dtype)


def _forward(layers: Sequence[MoELayer], layer: int, given: LayerInput, block: InBlock) -> LayerOutput:
    return layers[layer].forward(given.x, given.routes, given.homes_T, returns_T=given.returns_T, block=block)
