"""FixedBuffers: memory of every rank that stays where it is, in which a captured layer hands rows to its peers.

    x        [T, H]   partial sums (tp flows)                 routes   [N, 2 k]  int32: slots, bits of the fp32 weights
    rows     [N, H]   hidden states at home                   answers  [A, H]    outputs for the homes of others
    done     [N, H]   finished rows (tp flows)                ids      [N, k]    int16 slots carried beside them

Letters: T tokens of the group, N places for tokens at home on each rank, k choices; A is T, G N or G N k (`answer_rows`).
Sizes are the largest of a run, addresses never change, so that tables of peers' addresses can stand inside a graph.

Two barriers lie between two writes of any of them: what is read behind the barrier of one phase is written again only
behind that of another, which peers reach when they have read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from semmoe.dispatch import DispatchSpec

from ..transport.base import PeerBuffer
from ..transport.codec import torch_dtype
from ..transport.peer_memory import aligned

Sizes = dict[str, tuple[int, int, torch.dtype]]  # name: rows, columns, dtype


@dataclass(frozen=True)
class Shape:
    """What a layer is captured for: tokens T of the group (0 in dp, where they do not matter) and rows N, the places of each
    rank for tokens at home there."""

    tokens: int
    rows: int


@dataclass(frozen=True, eq=False)
class FixedBuffers:
    """See the module. What a flow does not need has no rows."""

    x: PeerBuffer
    rows: PeerBuffer
    done: PeerBuffer
    routes: PeerBuffer
    answers: PeerBuffer
    ids: PeerBuffer

    @classmethod
    def in_memory(cls, memory: PeerBuffer, rank: int, sizes: Sizes) -> FixedBuffers:
        """Laid out one after another in bytes that all ranks have reserved alike."""
        start, made = 0, {}
        for name, (rows, cols, dtype) in sizes.items():
            end = start + rows * cols * dtype.itemsize
            views_G = [peer.view(-1)[start:end].view(dtype).view(rows, cols) for peer in memory.peers_G]
            made[name] = PeerBuffer(views_G[rank], views_G, memory.table_G + start)
            start = aligned(end)
        return cls(**made)

    def poison(self) -> None:
        """NaN wherever a layer writes before it reads: all but its inputs."""
        for field in fields(self):
            local: Tensor = getattr(self, field.name).local
            if field.name != "x" and local.dtype.is_floating_point:
                local.fill_(torch.nan)


def bucket(rows: int) -> int:
    """Places for `rows` rows: up to one eighth more, so that few shapes have to be captured. 1..15 stay, 33 gives 36."""
    step = 2 ** max(int(math.log2(max(rows, 1))) - 3, 0)
    return max(-(-rows // step) * step, 1)


def answer_rows(spec: DispatchSpec, ranks: int, shape: Shape) -> int:
    """Rows in which a rank answers: one a token of the group, or one an assignment."""
    if spec.flow == "tp_replicated":
        return shape.tokens
    return ranks * shape.rows * (spec.top_k if spec.dispatcher == "a2a_assignment" else 1)


def sizes_of(spec: DispatchSpec, ranks: int, shape: Shape) -> Sizes:
    """(rows, columns, dtype) of every buffer for layers of at most this shape."""
    dtype, k, hidden = torch_dtype(spec.activation_dtype), spec.top_k, spec.hidden
    tp, here = spec.flow != "dp", spec.flow == "tp_replicated"
    return {
        "x": (shape.tokens if tp else 0, hidden, dtype),
        "rows": (0 if here else shape.rows, hidden, dtype),
        "done": (shape.rows if tp else 0, hidden, dtype),
        "routes": (0 if here else shape.rows, 2 * k, torch.int32),
        "answers": (answer_rows(spec, ranks, shape), hidden, dtype),
        "ids": (shape.rows if spec.carry_expert_ids else 0, k, torch.int16),
    }


def largest_sizes(spec: DispatchSpec, ranks: int, most_rows: int) -> Sizes:
    """Of a run with at most so many tokens at home on a rank."""
    return sizes_of(spec, ranks, Shape(most_rows * ranks, bucket(most_rows)))


def total_bytes(sizes: Sizes) -> int:
    return sum(aligned(rows * cols * dtype.itemsize) for rows, cols, dtype in sizes.values())
