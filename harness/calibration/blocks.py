"""What blocks of any model add to their MoE layers, as single operations for `rotate`, on CPU time.

Attention blocks of the model's shape with all heads (flow dp) and with a share of them (tp flows, whose output projection
leaves partial sums), dense layers, shared experts and the LM head, each over several layers' weights in turn: a layer of a
stack does not find its weights in the caches either.

Keys: (name, Work) for "blocks.attention...", (name, rows) for "blocks.dense...", "blocks.shared...", "blocks.head...", with
the names that simulator/cost/block_pass.py documents: a share over 4 ranks ends in ".tp4".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from semmoe.batch_form import BatchForm
from semmoe.run import Run

from ..blocks.attention import Caches, Sequences, make_attention
from ..blocks.forward import Mlp
from ..blocks.head_shard import HeadShard
from ..blocks.weights import BlockWeights
from ..reference.shuffle import rms_norm
from ..transport.codec import torch_dtype
from ..worker import RankContext
from .attention import Work
from .local_work import Operations
from .rotation import clocked

LAYERS = 3  # whose weights take turns
PROMPTS = ((1, 8), (1, 32), (1, 128), (4, 32), (2, 128), (4, 128))  # prefills: prompts, tokens of each
DECODES = ((1, 16), (4, 16), (16, 16), (96, 16), (4, 128), (16, 128), (64, 128), (16, 512))  # requests, cached tokens


def attention_works() -> Iterator[tuple[Work, BatchForm, int]]:
    """(work, form, tokens of the queue) of every timed batch."""
    for prompts, length in PROMPTS:
        pairs = prompts * length * (length + 1) // 2
        yield (prompts * length, prompts, pairs, 0), BatchForm("prefill", length), prompts * length
    for requests, cached in DECODES:
        yield (requests, requests, 0, requests * (cached + 1)), BatchForm("decode", cached), requests


def block_operations(context: RankContext, run: Run, rows: Sequence[int], entries: Sequence[int]) -> Operations:
    """All of them. rows: of dense layers and shared experts. entries: of the LM head. No heads are shared where they cannot."""
    model, dtype = run.model, torch_dtype(run.spec.activation_dtype)
    weights = BlockWeights(model, int(run.cfg["seed"]))
    operations: Operations = {}
    for ranks in sorted({1, context.ranks}):
        if model.num_heads % ranks:
            continue
        end, rank = (f".{model.name}.tp{ranks}", context.rank) if ranks > 1 else (f".{model.name}", 0)
        shard = HeadShard(model, rank, ranks)
        for work, form, tokens in attention_works():
            calls = [_attend(weights, layer % model.num_layers, shard, form, tokens, dtype) for layer in range(LAYERS)]
            operations[f"blocks.attention{end}", work] = clocked(partial(_next, cycle(calls)))
        for name, shared in (("dense", False), ("shared", True)):
            if not (model.shared_experts if shared else model.dense_ffn):
                continue
            mlps = [
                Mlp.share(weights.mlp(layer, shared), rank, ranks, torch.device("cpu"), dtype)
                for layer in range(LAYERS)
            ]
            operations |= _by_rows(f"blocks.{name}{end}", mlps, rows, model.hidden, dtype)
        head = weights.matrix(model.num_layers, "head", model.vocab_size, model.hidden).tensor_split(ranks)[rank]
        norm_H = weights.norm(model.num_layers, "input_norm", model.hidden).to(dtype)
        operations |= _by_rows(
            f"blocks.head{end}", [partial(_head, head.to(dtype), norm_H)], entries, model.hidden, dtype
        )
    return operations


def _attend(
    weights: BlockWeights, layer: int, shard: HeadShard, form: BatchForm, tokens: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """One attention block: norm, attention; with all heads also the residual and the norm behind it."""
    attention = make_attention(weights, layer, shard, Caches(0, form.sequences(tokens), form.positions), dtype)
    norm_H = weights.norm(layer, "input_norm", weights.model.hidden).to(dtype)
    sequences = Sequences.of(form.plan([tokens]), 0)
    x_nH = torch.randn(tokens, weights.model.hidden).to(dtype)

    def attend() -> Tensor:
        part = attention(rms_norm(x_nH, norm_H), sequences)
        return part if shard.ranks > 1 else rms_norm(x_nH + part, norm_H)

    return attend


def _by_rows(
    name: str, calls: Sequence[Callable[[Tensor], Tensor]], rows: Sequence[int], hidden: int, dtype: torch.dtype
) -> Operations:
    made: Operations = {}
    for n in rows:
        x_nH = torch.randn(n, hidden).to(dtype)
        made[name, n] = clocked(partial(_next, cycle([partial(call, x_nH) for call in calls])))
    return made


def _head(head_VH: Tensor, norm_H: Tensor, x_nH: Tensor) -> Tensor:
    return functional.linear(rms_norm(x_nH, norm_H), head_VH)


def _next(calls: Any) -> None:
    next(calls)()
