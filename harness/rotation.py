"""Time single operations as a layer meets them: each after other work, none in a loop of its own.

In a loop, an operation finds its code, inputs and weights in the caches; inside a layer it does not, because other
operations (and, on shared cores, other ranks) ran since the last time. Measured on a busy 2-core machine, CPU microseconds
in a loop / in rotation / inside a layer: shuffle plan of 512 tokens 54 / 430 / 650, gate of 128 tokens 170 / 500 / 580.
So operations are called in turn, in an order that is new every round and the same on all ranks, with a barrier before
each (not timed). Rounds also spread the samples of every operation over the whole calibration: drift hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from .record import no_collection
from .worker import RankContext

Key = TypeVar("Key", bound=Hashable)
Operation = Callable[[], tuple[float, float]]  # calls something once and returns its (CPU, wall) microseconds
WARMUP_ROUNDS = 1


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


def clocked(call: Callable[[], Any]) -> Operation:
    """`call` with its CPU time (of this thread: another process that has the core costs nothing) and wall time."""

    def timed() -> tuple[float, float]:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        call()
        return (time.thread_time_ns() - cpu_ns) / 1e3, (time.perf_counter_ns() - wall_ns) / 1e3

    return timed
