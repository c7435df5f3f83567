"""Time single operations as a layer meets them: each after other work, none in a loop of its own.

In a loop, an operation finds its code, inputs and weights in the caches; inside a layer it does not, because other
operations (and, on shared cores, other ranks) ran since the last time. So operations are called in turn, in an order that is
new every round and the same on all ranks, with a barrier before each (not timed). Rounds also spread the samples of every
operation over the whole calibration: drift hits all alike.

What every layer does again finds its code warm, though: the layer before ran it some milliseconds ago, a rotation of 200
operations did a second ago. Such an operation is timed `in_a_layer`: once untimed, then BETWEEN_US of walking over memory,
then timed. CPU microseconds on a busy 2-core machine in a loop / in rotation / so / inside a layer of uniform routes, 64 tokens
of each of 4 ranks: gate 139 / 690 / 201 / 278, index work 1186 / 2200 / 1181 / 1058, experts (the same weights again) 473 /
1051 / 533 / 712, of each of 2 ranks: 138 / 856 / 160 / 267, 1118 / 2733 / 1000 / 970, 752 / 1575 / 847 / 1259.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..record import no_collection
from ..worker import RankContext

Key = TypeVar("Key", bound=Hashable)
Operation = Callable[[], tuple[float, float]]  # calls something once and returns its (CPU, wall) microseconds
WARMUP_ROUNDS = 1
BETWEEN_US = (
    250.0  # stands for the other work of a layer, which touches less memory in its time; with 500, index work of all
)
# sizes takes 10 to 30 % more than inside a layer
BURNT_ROWS, BURNT_COLUMNS = 64, 1 << 15  # fp32 that `burn` walks over, row by row: 8 MiB


def rotate(
    context: RankContext, operations: Mapping[Key, Operation], samples: int, group: Any = None
) -> dict[Key, NDArray[np.float64]]:
    """[samples, 2] of (CPU, wall) microseconds of every operation. Collective over `group` (None: all ranks), with the
    same keys in the same order on all of its ranks."""
    keys = list(operations)
    found: dict[Key, list[tuple[float, float]]] = {key: [] for key in keys}
    with no_collection():
        for turn in range(samples + WARMUP_ROUNDS):
            for i in np.random.default_rng(turn).permutation(len(keys)):
                dist.barrier(group)
                taken = operations[keys[i]]()
                if turn >= WARMUP_ROUNDS:
                    found[keys[i]].append(taken)
            context.progress(turn + 1, samples + WARMUP_ROUNDS)
    dist.barrier(group)
    return {key: np.array(values, dtype=np.float64) for key, values in found.items()}


def in_a_layer(operation: Operation, burnt: Tensor) -> Operation:
    """`operation` after itself, as in the layer before, and other work."""

    def after_its_like() -> tuple[float, float]:
        operation()
        burn(BETWEEN_US, burnt)
        return operation()

    return after_its_like


def burnt_memory(up_to_bytes: int = 4 * BURNT_ROWS * BURNT_COLUMNS) -> Tensor:
    """What `burn` walks over."""
    columns = max(up_to_bytes // (4 * BURNT_ROWS), 1)
    return torch.zeros(BURNT_ROWS, min(columns, BURNT_COLUMNS))


def burn(cpu_us: float, burnt: Tensor) -> float:
    """Work of at least `cpu_us` of CPU time; returns what it was."""
    start, spent_us, row = time.thread_time_ns(), 0.0, 0
    while spent_us < cpu_us:
        burnt[row % len(burnt)].add_(1.0)
        row += 1
        spent_us = (time.thread_time_ns() - start) / 1e3
    return spent_us


def clocked(call: Callable[[], Any]) -> Operation:
    """`call` with its CPU time (of this thread: another process that has the core costs nothing) and wall time."""

    def timed() -> tuple[float, float]:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        call()
        return (time.thread_time_ns() - cpu_ns) / 1e3, (time.perf_counter_ns() - wall_ns) / 1e3

    return timed
