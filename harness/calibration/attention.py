"""What a full model adds to its MoE layers, as single operations for `rotate`, on CPU time.

An attention block (norms, projections, positions, one core a request) with all heads and with a share of them (tp flows,
whose output is a part of a sum over ranks), the LM head, and the bookkeeping of a step. The tiny model's; any other model
has no such terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semmoe.serving import DECODE, PREFILL, Request, StepPlan
from semmoe.specs import ModelSpec

from ..blocks.head_shard import HeadShard
from ..models.tiny import TinyConfig, TinyModel
from ..serving.sequences import OwnRequests, TinyAttention
from ..worker import RankContext
from .local_work import Operations
from .rotation import clocked

# (tokens, entries, (query, key) pairs of prefills, cached keys of decodes) of one block -> microseconds
Work = tuple[int, int, int, int]
CHUNKS = (
    (1, 8, 0),
    (1, 32, 0),
    (1, 128, 0),
    (4, 32, 0),
    (2, 64, 128),
    (1, 128, 256),
)  # prefills: entries, tokens, start
DECODES = (1, 4, 16)  # entries
LENGTHS = (16, 128, 512)  # KV length of decodes


def is_tiny(model: ModelSpec) -> bool:
    config = TinyConfig()
    ours = (config.hidden, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size)
    return ours == (
        model.hidden,
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.vocab_size,
    )


def attention_steps() -> Iterator[tuple[Work, list[tuple[int, int, int]]]]:
    """(work, entries of (phase, start, count)) of every timed step of one rank."""
    for entries, tokens, start in CHUNKS:
        pairs = entries * (tokens * start + tokens * (tokens + 1) // 2)
        yield (entries * tokens, entries, pairs, 0), [(PREFILL, start, tokens)] * entries
    for entries, length in product(DECODES, LENGTHS):
        yield (entries, entries, 0, entries * length), [(DECODE, length - 1, 1)] * entries
    yield (72, 9, 64 * 65 // 2, 8 * 128), [(PREFILL, 0, 64), *[(DECODE, 127, 1)] * 8]


def attention_operations(context: RankContext, model: ModelSpec) -> Operations:
    """("attention", work): one attention block for every piece of work, of another layer every time. ("attention.tp4",
    work): with a share of the heads over 4 ranks, where so many can share them."""
    operations: Operations = {}
    for ranks in sorted({1, context.ranks}):
        if model.num_heads % ranks:
            continue
        shard = HeadShard(model, context.rank, ranks) if ranks > 1 else None
        name = f"attention.tp{ranks}" if shard else "attention"
        own, tiny = _requests(context, shard)
        for i, (work, entries) in enumerate(attention_steps()):
            batch = own.batch(_plan(context.rank, entries))
            for entry in batch.entries:
                entry.sequence.key_LKSD.normal_(), entry.sequence.value_LKSD.normal_()
            x_nH = torch.randn(work[0], tiny.config.hidden)
            layer = i % tiny.config.num_layers
            operations[name, work] = clocked(partial(_untracked, own.attention.block, layer, x_nH, batch))
    return operations


def end_operations(context: RankContext, entries: Sequence[int]) -> Operations:
    """("head", n): LM head of n entries. ("step", n): their batch, embedding and sampled tokens."""
    own, model = _requests(context)
    operations: Operations = {}
    for n in entries:
        plan = _plan(context.rank, [(DECODE, 8, 1)] * n)
        batch, x_nH = own.batch(plan), torch.randn(n, model.config.hidden)
        logits_NV = _untracked(own.attention.head, x_nH, batch)
        operations["head", n] = clocked(partial(_untracked, own.attention.head, x_nH, batch))
        operations["step", n] = clocked(partial(_untracked, _around, own, plan, logits_NV))
    return operations


@torch.no_grad()
def _untracked(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


def _around(own: OwnRequests, plan: StepPlan, logits_NV: Tensor) -> None:
    batch = own.batch(plan)
    own.attention.embed(batch)
    own.sampled(batch, logits_NV)


def _requests(context: RankContext, shard: HeadShard | None = None) -> tuple[OwnRequests, TinyModel]:
    """Requests as long as any that is timed, of random tokens, on a model of random weights."""
    model = TinyModel()
    longest = max(start + count for _, entries in attention_steps() for _, start, count in entries) + 1
    most = max(len(entries) for _, entries in attention_steps()) + 64
    requests = [Request(i, 0.0, longest, 2) for i in range(most)]
    tokens = torch.randint(0, model.config.vocab_size, (longest + 1,), generator=torch.Generator().manual_seed(0))
    return OwnRequests(context.rank, TinyAttention(model, longest + 2, shard), requests, tokens, greedy=False), model


def _plan(rank: int, entries: list[tuple[int, int, int]]) -> StepPlan:
    columns = [(rank, request, phase, start, count) for request, (phase, start, count) in enumerate(entries)]
    return StepPlan(0, *np.array(columns, dtype=np.int64).T)
