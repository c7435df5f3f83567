"""Tasks that time the local work of a rank, one operation in a loop of its own; see single_ops.py for collectives.

CPU time of the thread while all ranks work at once: what an operation costs on a core that it has for itself, caches
shared. Only planning is timed by the wall clock of all ranks together: every rank plans the same step, and a layer
waits for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.planning import StepPlanner

from .dispatchers import local_work
from .layer import MoELayer, Routes
from .record import no_collection
from .reference.experts import run_experts
from .timing import PhaseTimer
from .transport.plan import ShufflePlan
from .worker import RankContext

Samples = dict[tuple[str, int], tuple[int, list[float]]]  # (what, tokens) -> (rows handled, microseconds)


class CpuTimer(PhaseTimer):
    """PhaseTimer on the CPU time of this thread: a lap during which another process has the core costs nothing."""

    def start_layer(self) -> None:
        super().start_layer()
        self._last = time.thread_time_ns()

    def lap(self, phase: str) -> None:
        self.laps_ns[-1][phase] += time.thread_time_ns() - self._last
        self._last = time.thread_time_ns()


def cpu_and_wall_us(call: Callable[[], Any], samples: int) -> tuple[list[float], list[float]]:
    """CPU and wall microseconds of each of `samples` calls, after two that warm up."""
    cpu, wall = [], []
    for i in range(samples + 2):
        wall_start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
        call()
        if i >= 2:
            cpu.append((time.thread_time_ns() - cpu_start) / 1e3)
            wall.append((time.perf_counter_ns() - wall_start) / 1e3)
    return cpu, wall


def time_experts(
    context: RankContext, layer: MoELayer, grid: Sequence[tuple[int, int]], samples: int, alone: bool
) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """(CPU, wall) microseconds a call of the experts for every (active experts, rows of each).

    alone: rank 0 works while the others wait in a barrier; else all work at once.
    """
    w13_S2FH, w2_SHF = layer.weights.w13_S2FH, layer.weights.w2_SHF
    times = {}
    with no_collection():
        for active, each in grid:
            counts_S = torch.zeros(len(w13_S2FH), dtype=torch.int64)
            counts_S[:active] = each
            rows_NH = torch.randn(active * each, w2_SHF.shape[1]).to(w2_SHF.dtype)
            dist.barrier()
            if not alone or context.rank == 0:
                call = partial(run_experts, rows_NH, counts_S, w13_S2FH, w2_SHF)
                times[active, each] = cpu_and_wall_us(call, samples)
    dist.barrier()
    return times


def time_index_work(context: RankContext, layers: dict[str, MoELayer], tokens: Sequence[int], samples: int) -> Samples:
    """Gate and index work (packing, sorting by expert, weighting, adding up) for n tokens at home on every rank.

    Keys: ("gate", n) and ("permute." + dispatcher or flow, n). Routes are uniform over all slots.
    """
    times: Samples = {}
    with no_collection():
        for done, n in enumerate(tokens, 1):
            for name, layer in layers.items():
                times[f"permute.{name}", n] = _permute_us(layer, n, samples)
            gated = next(iter(layers.values()))
            x, routes, _ = _synthetic(gated, n)
            dist.barrier()
            call = partial(gated._route, x, routes, home=context.rank)
            times["gate", n] = n, cpu_and_wall_us(call, samples)[0]
            context.progress(done, len(tokens))
    return times


def time_planning(context: RankContext, planner: StepPlanner, tokens: Sequence[int], samples: int) -> Samples:
    """Wall microseconds a layer of planning the homes of n tokens on all ranks at once.

    Keys: ("plan.tp_shuffled", n) with look-up, assignment and shuffle plan; ("plan.tp_scattered", n) the latter only.
    """
    times: Samples = {}
    rng = np.random.default_rng(0)
    with no_collection():
        for n in tokens:
            rows_T = rng.integers(0, planner.trace.num_tokens, n)
            homes_T = rng.integers(0, context.ranks, n)
            dist.barrier()
            _, whole = cpu_and_wall_us(partial(planner.route, rows_T, None), samples)
            dist.barrier()
            _, shuffle = cpu_and_wall_us(partial(ShufflePlan.from_homes, homes_T, context.ranks), samples)
            layers = planner.trace.num_layers
            times["plan.tp_scattered", n] = n, shuffle
            times["plan.tp_shuffled", n] = n, [w / layers + s for w, s in zip(whole, shuffle, strict=True)]
    return times


def time_machine(context: RankContext, dtype: torch.dtype, samples: int) -> dict[str, float]:
    """Copy bandwidth (read + write) and matrix rate of one core, by rank 0 while the others wait."""
    figures: dict[str, float] = {}
    if context.rank == 0:
        source, target = torch.rand(8 << 20), torch.empty(8 << 20)
        a, b = (torch.rand(512, 512).to(dtype) for _ in range(2))
        copy_us = min(cpu_and_wall_us(lambda: target.copy_(source), samples)[0])
        product_us = min(cpu_and_wall_us(lambda: a @ b, samples)[0])
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


def _permute_us(layer: MoELayer, tokens: int, samples: int) -> tuple[int, list[float]]:
    """(rows handled, index work of a layer) from three loops: towards the ranks, around the experts, and back.

    Rows handled: expert rows + rows sent + rows received. In tp_replicated every rank holds all ranks' tokens.
    """
    transport, dispatcher = layer.transport, layer._dispatcher
    timer = layer.timer = CpuTimer()
    x, routes, weights = _synthetic(layer, tokens if dispatcher else tokens * transport.ranks)

    def towards() -> Any:
        if dispatcher is not None:
            return dispatcher.dispatch(x, routes.slots_Tk, weights, None, timer)
        work, _ = local_work(x, routes.slots_Tk, weights, layer.slots_per_rank, transport.rank)
        timer.lap("permute")
        return work

    work, towards_us = _loop(layer, towards, samples)
    handled = sum(
        sum(n for g, n in enumerate(way or []) if g != transport.rank)
        for operation in transport.counter.now.operations
        for way in (operation.sent_G, operation.received_G)
    )
    out, around_us = _loop(layer, lambda: layer._run_experts(work), samples)
    handled += transport.counter.now.expert_rows
    total = towards_us + around_us
    if dispatcher is not None:
        total = total + _loop(layer, lambda: dispatcher.combine(out.clone(), timer), samples)[1]
    return handled, total.tolist()


def _loop(layer: MoELayer, call: Callable[[], Any], samples: int) -> tuple[Any, np.ndarray]:
    """(last result, microseconds of the laps named permute) of `samples` calls after one that warms up."""
    timer, counter = layer.timer, layer.transport.counter
    result: Any = None
    times = []
    dist.barrier()
    for _ in range(samples + 1):
        timer.reset()
        counter.reset()
        counter.start_layer()
        timer.start_layer()
        result = call()
        times.append(timer.laps_ns[-1]["permute"] / 1e3)
    return result, np.array(times[1:])
