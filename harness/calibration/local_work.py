"""Local work of a rank as single operations for `rotate`; see planning.py for planning, collectives.py for collectives.

CPU time of the thread while all ranks work at once: what an operation costs on a core that it has for itself.

Keys: ("experts", active experts, rows each), ("gate", tokens), ("permute." + dispatcher or flow, tokens, part).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatchers import local_work, make_dispatcher
from ..layer import MoELayer, Routes
from ..reference.experts import run_experts
from ..timing import PhaseTimer
from ..worker import RankContext
from .rotation import Operation, clocked

Operations = dict[tuple[Any, ...], Operation]


def expert_operations(layers: Sequence[MoELayer], grid: Sequence[tuple[int, int]]) -> Operations:
    """The experts for every (active experts, rows of each); their weights are those of another layer every time."""
    operations: Operations = {}
    turns = cycle([(layer.weights.w13_S2FH, layer.weights.w2_SHF) for layer in layers])

    def next_layer(rows_NH: Tensor, counts_S: Tensor) -> None:
        run_experts(rows_NH, counts_S, *next(turns))

    w13_S2FH, w2_SHF = next(turns)
    for active, each in grid:
        counts_S = torch.zeros(len(w13_S2FH), dtype=torch.int64)
        counts_S[:active] = each
        rows_NH = torch.randn(active * each, w2_SHF.shape[1]).to(w2_SHF.dtype)
        operations["experts", active, each] = clocked(partial(next_layer, rows_NH, counts_S))
    return operations


def gate_operations(layer: MoELayer, tokens: Sequence[int]) -> Operations:
    """Scores, top-k and weights of n tokens at home on every rank."""
    operations: Operations = {}
    for n in tokens:
        x, routes, _ = _synthetic(layer, n)
        operations["gate", n] = clocked(partial(layer.gate.route, x, routes, home=layer.transport.rank))
    return operations


def permute_operations(
    layers: dict[str, MoELayer], tokens: Sequence[int]
) -> tuple[Operations, dict[tuple[str, int], int]]:
    """Index work (packing, sorting by expert, weighting, adding up) for n tokens at home, with uniform routes.

    Parts: "towards" the ranks, "around" the experts, "back"; a layer does each once. Also the rows handled: expert rows
    + rows sent + rows received. In tp_replicated every rank holds all ranks' tokens. Collective.
    """
    operations: Operations = {}
    handled: dict[tuple[str, int], int] = {}
    for name, layer in layers.items():
        layer.timer = PhaseTimer(clock=time.thread_time_ns)  # while another process has the core it stands still
        for n in tokens:
            parts, rows = _permute(layer, n)
            key = f"permute.{name}"
            handled[key, n] = rows
            operations |= {(key, n, part): partial(_lap, layer, call) for part, call in parts.items()}
    return operations, handled


def time_machine(context: RankContext, dtype: torch.dtype, samples: int) -> dict[str, float]:
    """Copy bandwidth (read + write) and matrix rate of one core, by rank 0 while the others wait."""
    figures: dict[str, float] = {}
    if context.rank == 0:
        source, target = torch.rand(8 << 20), torch.empty(8 << 20)
        a, b = (torch.rand(512, 512).to(dtype) for _ in range(2))
        copy, product = clocked(lambda: target.copy_(source)), clocked(lambda: a @ b)
        copy_us = min(copy()[0] for _ in range(samples))
        product_us = min(product()[0] for _ in range(samples))
        figures = {
            "memory_gbps": 2 * source.numel() * 4 / copy_us / 1e3,
            "tflops": 2 * 512**3 / product_us / 1e6,
        }
    dist.barrier()
    return figures


def _synthetic(layer: MoELayer, tokens: int) -> tuple[Tensor, Routes, Tensor]:
    """(rows, uniform routes, weights) of this many tokens; another seed on every rank."""
    generator = torch.Generator().manual_seed(layer.transport.rank)
    slots_Tk = torch.rand(tokens, layer.placement.num_slots, generator=generator).argsort(dim=1)[:, : layer.spec.top_k]
    x = torch.randn(tokens, layer.spec.hidden, generator=generator).to(layer.dtype)
    return x, Routes(slots_Tk.contiguous()), torch.full(slots_Tk.shape, 1.0 / layer.spec.top_k)


def _permute(layer: MoELayer, tokens: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """(the parts of a layer's index work, rows handled). A dispatcher of its own keeps what its combine answers."""
    transport, spec = layer.transport, layer.spec
    timer, counter = layer.timer, transport.counter
    replicated = spec.flow == "tp_replicated"
    dispatcher = None if replicated else make_dispatcher(spec, transport, layer.slots_per_rank, tokens)
    x, routes, weights = _synthetic(layer, tokens * transport.ranks if replicated else tokens)

    def towards() -> Any:
        if dispatcher is not None:
            return dispatcher.dispatch(x, routes.slots_Tk, weights, None, timer)
        work, _ = local_work(x, routes.slots_Tk, weights, layer.slots_per_rank, transport.rank)
        timer.lap("permute")
        return work

    for started in (timer, counter):
        started.reset()
        started.start_layer()
    work = towards()
    sent_and_received = [(o.sent_G, o.received_G) for o in counter.now.operations]
    out = layer._run_experts(work)
    handled = counter.now.expert_rows + sum(
        sum(n for g, n in enumerate(way or []) if g != transport.rank) for ways in sent_and_received for way in ways
    )
    parts: dict[str, Callable[[], Any]] = {"towards": towards, "around": lambda: layer._run_experts(work)}
    if dispatcher is not None:

        def back() -> Any:
            answer = out.clone()  # combine adds into it
            timer.start_layer()
            return dispatcher.combine(answer, timer)

        parts["back"] = back
    return parts, handled


def _lap(layer: MoELayer, call: Callable[[], Any]) -> tuple[float, float]:
    """CPU microseconds of the laps named permute of one call, twice: such laps have no wall time of their own."""
    layer.timer.reset()
    layer.transport.counter.reset()
    layer.transport.counter.start_layer()
    layer.timer.start_layer()
    call()
    us = layer.timer.laps_ns[-1]["permute"] / 1e3
    return us, us
