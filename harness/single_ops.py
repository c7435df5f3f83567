"""Tasks that time one operation of the layer at a time, in loops of its own; `calibrate.py` fits costs from them.

Collectives are timed by the wall clock: `inner` calls in a row after one barrier, so that the ranks wait for each other
as they do inside a layer and the skew of a barrier is not counted again with every operation. Before every call each
rank burns `busy_us` of CPU time, which is taken off again (times ranks / cores where they share cores): there, a message
waits until the scheduler runs its receiver, and that takes longer when the ranks also compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .record import no_collection
from .stack import make_transport
from .timing import PhaseTimer
from .transport.base import RowTransport
from .transport.plan import ShufflePlan
from .worker import RankContext

Operation = Callable[[], Any]
STAGE_BYTES = 64 << 20  # what one operation may stage in shared memory; pages are touched only when used
META_INTS = 8  # int32 that gather_rows carries beside a row: slot and weight of four choices


class CpuTimer(PhaseTimer):
    """PhaseTimer on the CPU time of this thread: a lap during which another process has the core costs nothing."""

    def start_layer(self) -> None:
        super().start_layer()
        self._last = time.thread_time_ns()

    def lap(self, phase: str) -> None:
        now = time.thread_time_ns()
        self.laps_ns[-1][phase] += now - self._last
        self._last = time.thread_time_ns()


def time_collectives(
    context: RankContext,
    name: str,
    cases: Sequence[tuple[str, int, float]],
    hidden: int,
    samples: int,
    inner: int,
    members: int,
    busy_us: float,
    cores: int,
) -> dict[tuple[str, int, float], list[float]]:
    """Microseconds a call, one value a sample, of every (operation, rows a rank, skew) among the first `members` ranks,
    over the transport `name`.

    rows: tokens at home on an average rank (srs, sag, ...), or rows that an average rank sends away (dispatch, ...).
    skew: share of all that rank 0 gets beyond its even part. Values are this rank's own; the pool takes the maximum.
    """
    group = _subgroup(context, members)
    if context.rank >= members:
        dist.barrier()
        return {}
    transport = make_transport(name, group, STAGE_BYTES)
    assert isinstance(transport, RowTransport)
    transport.counter.reset()  # it stays on, as in a measured layer, and forgets: no layer has started
    times: dict[tuple[str, int, float], list[float]] = {}
    with no_collection():
        for done, (op, rows, skew) in enumerate(cases, 1):
            call = _collective(transport, op, rows, hidden, skew, group)
            for _ in range(2):
                call()
            times[op, rows, skew] = [_wall_us(call, inner, group, busy_us, members / cores) for _ in range(samples)]
            context.progress(done, len(cases))
    transport.close()
    if members < context.ranks:
        dist.barrier()
    return times


def _subgroup(context: RankContext, members: int) -> Any:
    """The process group of the first ranks; made once, by all ranks together."""
    if members == context.ranks:
        return None
    groups = context.state.setdefault("subgroups", {})
    if members not in groups:
        groups[members] = dist.new_group(list(range(members)))
    return groups[members]


def _wall_us(call: Operation, inner: int, group: Any, busy_us: float, ranks_per_core: float) -> float:
    dist.barrier(group)
    start = time.perf_counter_ns()
    for _ in range(inner):
        _burn(busy_us)
        call()
    taken_us = (time.perf_counter_ns() - start) / inner / 1e3
    return max(taken_us - busy_us * max(ranks_per_core, 1.0), 1.0)


def _burn(cpu_us: float) -> None:
    end = time.thread_time_ns() + int(cpu_us * 1e3)
    while time.thread_time_ns() < end:
        pass


def _collective(transport: RowTransport, op: str, rows: int, hidden: int, skew: float, group: Any) -> Operation:
    """A call of one transport operation with synthetic rows."""
    rank, ranks = transport.rank, transport.ranks
    generator = torch.Generator().manual_seed(rank)
    if op == "barrier":
        return lambda: dist.barrier(group)
    if op in ("dispatch", "combine", "alltoall"):
        send_G, receive_G = exchange_sizes(rank, ranks, rows, skew)
        x_NH = torch.randn(sum(send_G), hidden, generator=generator)
        if op == "combine":
            return lambda: transport.combine(x_NH, send_G, receive_G, 0)
        if op == "dispatch":
            meta_G = [n + n // 2 for n in send_G]  # a deduplicated row serves about one and a half assignments
            meta_M2 = torch.zeros(sum(meta_G), 2, dtype=torch.int32)
            return lambda: transport.dispatch(x_NH, send_G, meta_M2, meta_G, 0)
        got = torch.empty(sum(receive_G), hidden)
        return lambda: dist.all_to_all_single(got, x_NH, receive_G, send_G, group=group)
    counts_G = home_sizes(ranks, rows, skew)
    total = sum(counts_G)
    if op in ("srs", "reduce_scatter", "sag", "all_gather"):
        plan = _plan(counts_G, shuffled=op in ("srs", "sag"))
        if op in ("srs", "reduce_scatter"):
            x_TH = torch.randn(total, hidden, generator=generator)
            return lambda: transport.srs(x_TH, plan, op=op)
        x_nH = torch.randn(counts_G[rank], hidden, generator=generator)
        return lambda: transport.sag(x_nH, plan, op=op)
    if op == "all_reduce":
        x_TH = torch.randn(total, hidden, generator=generator)
        return lambda: transport.all_reduce(x_TH)
    x_nH = torch.randn(counts_G[rank], hidden, generator=generator)
    if op == "gather_rows":
        meta_nM = torch.zeros(counts_G[rank], META_INTS, dtype=torch.int32)
        return lambda: transport.gather_rows(x_nH, meta_nM, None)
    if op == "reduce_rows":
        x_TH = torch.randn(total, hidden, generator=generator)
        return lambda: transport.reduce_rows(x_TH, counts_G)
    if op in ("dispatch_slots", "combine_slots"):
        return _slots(transport, op, x_nH, rows)
    raise ValueError(f"no such operation: {op}")


def _slots(transport: RowTransport, op: str, x_nH: Tensor, capacity: int) -> Operation:
    """`capacity` places a pair of ranks, filled to 1 / ranks: what uniform routing leaves of k places a token."""
    filled = max(capacity // transport.ranks, 1)
    send_G = [0 if d == transport.rank else filled for d in range(transport.ranks)]
    rows_NH = x_nH[:1].repeat(sum(send_G), 1)
    meta_N2 = torch.zeros(sum(send_G), 2, dtype=torch.int32)
    received = transport.dispatch_slots(rows_NH, send_G, meta_N2, capacity, 0)
    if op == "dispatch_slots":
        return lambda: transport.dispatch_slots(rows_NH, send_G, meta_N2, capacity, 0)
    return lambda: transport.combine_slots(received.rows_NC, received, send_G, capacity, 0)


def exchange_sizes(rank: int, ranks: int, rows: int, skew: float) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each rank): `rows` leave every rank, a share `skew` of them towards rank 0 (which
    spreads its own), the rest evenly. Worked example, 3 ranks, 4 rows, skew 0.5: rank 1 sends [3, 0, 1]."""

    def sent(source: int) -> list[int]:
        others = [d for d in range(ranks) if d != source]
        extra = 0 if source == 0 else int(rows * skew)
        even = [(rows - extra) // len(others) + (i < (rows - extra) % len(others)) for i in range(len(others))]
        out = [0] * ranks
        for d, n in zip(others, even, strict=True):
            out[d] = n + (extra if d == 0 else 0)
        return out

    return sent(rank), [sent(source)[rank] for source in range(ranks)]


def home_sizes(ranks: int, rows: int, skew: float) -> list[int]:
    """Tokens at home on each rank, `rows` on average; rank 0 has the share `skew` of the others' on top."""
    moved = int(rows * skew)
    return [rows + moved * (ranks - 1)] + [rows - moved] * (ranks - 1)


def _plan(counts_G: list[int], shuffled: bool) -> ShufflePlan:
    homes_T = np.repeat(np.arange(len(counts_G)), counts_G)
    if shuffled:
        homes_T = np.random.default_rng(0).permutation(homes_T)
    return ShufflePlan.from_homes(homes_T, len(counts_G))
