"""Tasks that time what a full model adds to its MoE layers, one operation in a loop of its own, on CPU time.

An attention block (norms, projections, positions, one core a request), the LM head, and the bookkeeping of a step. The
tiny model's; any other model has no such terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.serving import DECODE, PREFILL, Request, StepPlan
from semmoe.specs import ModelSpec

from .models.tiny import TinyConfig, TinyModel
from .record import no_collection
from .sequences import OwnRequests, TinyAttention
from .single_local import Samples, cpu_and_wall_us
from .worker import RankContext

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


def time_attention(context: RankContext, samples: int) -> dict[Work, list[float]]:
    """CPU microseconds of one attention block for every piece of work, all ranks at once."""
    own, model = _requests(context)
    times: dict[Work, list[float]] = {}
    with torch.no_grad(), no_collection():
        for work, entries in attention_steps():
            batch = own.batch(_plan(context.rank, entries))
            for entry in batch.entries:
                entry.sequence.key_LKSD.normal_(), entry.sequence.value_LKSD.normal_()
            x_nH = torch.randn(work[0], model.config.hidden)
            dist.barrier()
            times[work] = cpu_and_wall_us(partial(own.attention.block, 0, x_nH, batch), samples)[0]
    dist.barrier()
    return times


def time_ends(context: RankContext, entries: Sequence[int], samples: int) -> Samples:
    """("head", n): LM head of n entries. ("step", n): their batch, embedding and sampled tokens. CPU microseconds."""
    own, model = _requests(context)
    times: Samples = {}
    with torch.no_grad(), no_collection():
        for n in entries:
            plan = _plan(context.rank, [(DECODE, 8, 1)] * n)
            batch, x_nH = own.batch(plan), torch.randn(n, model.config.hidden)
            logits_NV = own.attention.head(x_nH, batch)
            dist.barrier()
            times["head", n] = n, cpu_and_wall_us(partial(own.attention.head, x_nH, batch), samples)[0]
            times["step", n] = n, cpu_and_wall_us(partial(_around, own, plan, logits_NV), samples)[0]
    dist.barrier()
    return times


def _around(own: OwnRequests, plan: StepPlan, logits_NV: Tensor) -> None:
    batch = own.batch(plan)
    own.attention.embed(batch)
    own.sampled(batch, logits_NV)


def _requests(context: RankContext) -> tuple[OwnRequests, TinyModel]:
    """Requests as long as any that is timed, of random tokens, on a model of random weights."""
    model = TinyModel()
    longest = max(start + count for _, entries in attention_steps() for _, start, count in entries) + 1
    most = max(len(entries) for _, entries in attention_steps()) + 64
    requests = [Request(i, 0.0, longest, 2) for i in range(most)]
    tokens = torch.randint(0, model.config.vocab_size, (longest + 1,), generator=torch.Generator().manual_seed(0))
    return OwnRequests(context.rank, TinyAttention(model, longest + 2), requests, tokens, greedy=False), model


def _plan(rank: int, entries: list[tuple[int, int, int]]) -> StepPlan:
    columns = [(rank, request, phase, start, count) for request, (phase, start, count) in enumerate(entries)]
    return StepPlan(0, *np.array(columns, dtype=np.int64).T)
