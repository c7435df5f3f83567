"""Task that times the collectives of a layer, one operation at a time; `fit.py` fits costs from them.

Wall clock: `inner` calls in a row after one barrier, so that the ranks wait for each other as they do inside a layer. The
first two are kept apart: they also wait for the ranks that leave the barrier late, and for each other at the end, as the
exchanges of a layer do that is timed alone. Both readings count from the barrier on, and the slowest rank is taken of each
before they are subtracted: of single calls another rank is the slowest each time.
Before every call each rank burns CPU time on as much memory as the experts of a layer take, `Work.busy_us` on average, which is
taken off again (times the ranks of a core): there, a message waits until the scheduler runs its receiver, and that takes
longer when the ranks also compute; and what the call itself needs is no longer in the caches. No two burns are alike: with
one length the ranks fall into step with the scheduler's slices, and microseconds of a call of 6 rows of 4 ranks on 2 cores
come out as dispatch 4894, 3968, 3438, 4340 and combine 2415, 1769, 1204, 1808 after 300, 600, 1000 and 1500 of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..transport.choose import make_transport
from ..transport.plan import ShufflePlan
from ..transport.rows import RowTransport
from ..worker import RankContext
from .rotation import Operation, burn, burnt_memory, rotate

STAGE_BYTES = 64 << 20  # what one operation may stage in shared memory; pages are touched only when used
OPENING = 2  # calls after a barrier that are kept apart: the exchanges of a layer of attention-DP
BURNT_SPAN = 0.25, 1.75  # of busy_us: from, to
META_INTS = 8  # int32 that gather_rows carries beside a row: slot and weight of four choices


class Case(NamedTuple):
    """One operation of one size. rows: tokens at home on an average rank (srs, sag, ...), rows that an average rank
    sends away (dispatch, ...), or places a pair of ranks (dispatch_slots, ...).

    skew: share of its rows that a rank sends to rank 0 beyond that one's even part; with pattern "port" every rank
    does, with "pair" rank 1 alone. For srs and sag, the share of the others' tokens that rank 0 has at home as well.
    """

    op: str
    rows: int
    skew: float = 0.0
    pattern: str = "port"


def time_collectives(
    context: RankContext,
    name: str,
    cases: Sequence[Case],
    hidden: int,
    samples: int,
    inner: int,
    members: int,
    work: Work,
) -> dict[Case, NDArray[np.float64]]:
    """[samples, 2] of microseconds from the barrier to the end of (the second call, the last one) for every case among
    the first `members` ranks, over the transport `name`. Values are this rank's own; `per_call` takes the slowest."""
    group = _subgroup(context, members)
    if context.rank >= members:
        dist.barrier()
        return {}
    transport = make_transport(name, group, STAGE_BYTES)
    assert isinstance(transport, RowTransport)
    transport.counter.reset()  # it stays on, as in a measured layer, and forgets: no layer has started
    operations: dict[Case, Operation] = {
        case: partial(_in_a_row, _collective(transport, case, hidden, group), inner, work) for case in cases
    }
    times = rotate(context, operations, samples, group)
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


@dataclass(eq=False)
class Work:
    """What ranks do between two calls, all of them the same: they draw from one sequence."""

    busy_us: float
    layer_bytes: int
    ranks_per_core: int
    rng: np.random.Generator = field(default_factory=partial(np.random.default_rng, 0))

    @cached_property
    def burnt(self) -> Tensor:
        return burnt_memory(self.layer_bytes)

    def do(self) -> float:
        """Returns by how many microseconds it delays the ranks of this core."""
        return burn(self.busy_us * self.rng.uniform(*BURNT_SPAN), self.burnt) * self.ranks_per_core


def _in_a_row(call: Callable[[], Any], inner: int, work: Work) -> tuple[float, float]:
    """From now to the end of (the second call, the last call), without the work before them."""
    work_us, start = 0.0, time.perf_counter_ns()
    ends_us = []
    for _ in range(inner):
        work_us += work.do()
        call()
        ends_us.append((time.perf_counter_ns() - start) / 1e3 - work_us)
    return ends_us[OPENING - 1], ends_us[-1]


def per_call(ends_GS2: NDArray[np.float64], inner: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(the first two calls together, mean of the others) by sample, as the slowest of the ranks sees them; at least 1 us.

    Worked example, two ranks, four calls: [200, 400] and [240, 360] -> 240 and (400 - 240) / 2 = 80."""
    opening_S, last_S = ends_GS2.max(axis=0).T
    return np.maximum(opening_S, 1.0), np.maximum((last_S - opening_S) / (inner - OPENING), 1.0)


def _collective(transport: RowTransport, case: Case, hidden: int, group: Any) -> Callable[[], Any]:
    """A call of one transport operation with synthetic rows."""
    rank, ranks = transport.rank, transport.ranks
    op, rows, skew, pattern = case
    generator = torch.Generator().manual_seed(rank)
    if op == "barrier":
        return lambda: dist.barrier(group)
    if op in ("dispatch", "combine", "alltoall"):
        send_G, receive_G = exchange_sizes(rank, ranks, rows, skew, pattern)
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


def _slots(transport: RowTransport, op: str, x_nH: Tensor, capacity: int) -> Callable[[], Any]:
    """`capacity` places a pair of ranks, filled to 1 / ranks: what uniform routing leaves of k places a token."""
    filled = max(capacity // transport.ranks, 1)
    send_G = [0 if d == transport.rank else filled for d in range(transport.ranks)]
    rows_NH = x_nH[:1].repeat(sum(send_G), 1)
    meta_N2 = torch.zeros(sum(send_G), 2, dtype=torch.int32)
    received = transport.dispatch_slots(rows_NH, send_G, meta_N2, capacity, 0)
    if op == "dispatch_slots":
        return lambda: transport.dispatch_slots(rows_NH, send_G, meta_N2, capacity, 0)
    return lambda: transport.combine_slots(received.rows_NC, received, send_G, capacity, 0)


def exchange_sizes(rank: int, ranks: int, rows: int, skew: float, pattern: str = "port") -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each rank) of a Case: `rows` leave every rank, those not sent on purpose to rank 0
    are spread evenly. Worked example, 3 ranks, 4 rows, skew 0.5, either pattern: rank 1 sends [3, 0, 1]."""
    rows_GG = exchange_rows(ranks, rows, skew, pattern)
    return rows_GG[rank].tolist(), rows_GG[:, rank].tolist()


def exchange_rows(ranks: int, rows: int, skew: float, pattern: str = "port") -> NDArray[np.int64]:
    """[G, G] rows from each rank to each other of a Case."""
    rows_GG = np.zeros((ranks, ranks), dtype=np.int64)
    for source in range(ranks):
        others = [d for d in range(ranks) if d != source]
        hot = source > 0 if pattern == "port" else source == 1
        extra = int(rows * skew) if hot else 0
        rows_GG[source, others] = (rows - extra) // len(others)
        rows_GG[source, others[: (rows - extra) % len(others)]] += 1
        rows_GG[source, 0] += extra
    return rows_GG


def home_sizes(ranks: int, rows: int, skew: float) -> list[int]:
    """Tokens at home on each rank, `rows` on average; rank 0 has the share `skew` of the others' on top."""
    moved = int(rows * skew)
    return [rows + moved * (ranks - 1)] + [rows - moved] * (ranks - 1)


def _plan(counts_G: list[int], shuffled: bool) -> ShufflePlan:
    homes_T = np.repeat(np.arange(len(counts_G)), counts_G)
    if shuffled:
        homes_T = np.random.default_rng(0).permutation(homes_T)
    return ShufflePlan.from_homes(homes_T, len(counts_G))
