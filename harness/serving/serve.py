"""A served run in real time: rank 0 owns the ServingLoop, broadcasts every StepPlan, and feeds back its duration.

Arrivals lie on the wall clock, which stands still while the harness does what a server would not: collecting the
hidden states that stand for attention, and gathering counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from semmoe.planning import RoutedStep, StepPlanner
from semmoe.run import Run
from semmoe.serving import ServingLoop, StepPlan, TokenRows
from semmoe.serving.steplog import StepLog

from ..check import check_step
from ..device.plan import planner_of
from ..record import RankRecord, no_collection
from ..stack import Stack, StepResult
from ..worker import RankContext

Execute = Callable[[StepPlan, RoutedStep], StepResult]  # one step, collective
COLUMNS = 5  # rank, request, phase, start, count
LONGEST_NAP_S = 5.0  # between signs of life to the pool


@dataclass(eq=False)
class Clock:
    """Milliseconds since the start, less the pauses."""

    start_s: float = field(default_factory=time.perf_counter)
    paused_s: float = 0.0

    def now_ms(self) -> float:
        return (time.perf_counter() - self.start_s - self.paused_s) * 1e3

    def set_back_to(self, now_ms: float) -> None:
        """Count everything after `now_ms` as a pause."""
        self.paused_s += max(self.now_ms() - now_ms, 0.0) / 1e3


@dataclass(eq=False)
class Server:
    """Rank 0's side: what arrives when, and the log."""

    loop: ServingLoop
    clock: Clock = field(default_factory=Clock)
    arrived: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    began_ms: list[float] = field(default_factory=list)
    durations_ms: list[float] = field(default_factory=list)

    def next_plan(self, context: RankContext) -> StepPlan | None:
        """The next step, waiting for arrivals where nothing can run; None when all requests are served."""
        requests = self.loop.requests
        while True:
            now_ms = self.clock.now_ms()
            while self.arrived < len(requests) and requests[self.arrived].arrival_ms <= now_ms:
                self.loop.submit(requests[self.arrived], requests[self.arrived].arrival_ms)
                self.arrived += 1
            answer = self.loop.next_step(now_ms)
            if answer is None:
                return None
            if isinstance(answer, StepPlan):
                self.plans.append(answer)
                self.began_ms.append(now_ms)
                return answer
            time.sleep(min(max((answer - now_ms) / 1e3, 0.0), LONGEST_NAP_S))
            context.progress(self.arrived, len(requests))

    def complete(self, plan: StepPlan, duration_ms: float) -> None:
        self.loop.complete(plan, duration_ms)
        self.durations_ms.append(duration_ms)
        self.clock.set_back_to(self.began_ms[-1] + duration_ms)


def measure_serve(context: RankContext, run: Run) -> RankRecord:
    """Task of every rank: check and warm up on the first requests' tokens, then serve all requests."""
    planner = planner_of(run)
    tokens = TokenRows.of(run.workload.requests)
    record, execute = (_prepare_full if run.scope == "full_model" else _prepare_layers)(context, run, planner)
    server = Server(run.serving_loop()) if context.rank == 0 else None
    with no_collection():
        dist.barrier()
        if server is not None:
            server.clock = Clock()  # the first request arrives now, not while the garbage collector ran
        while True:
            plan = _broadcast_plan(server.next_plan(context) if server else None)
            if plan is None:
                break
            routed = planner.route(*plan.token_rows(tokens))
            step_ns = record.keep(execute(plan, routed), routed, barrier_each_layer=False)
            slowest = torch.tensor([step_ns], dtype=torch.int64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if server is not None:
                server.complete(plan, float(slowest.item()) / 1e6)
                context.progress(int(np.isfinite(server.loop.finish_ms_R).sum()), len(run.workload.requests))
    if server is not None:
        loop = server.loop
        record.extra = {
            "first_token_ms_R": loop.first_token_ms_R,
            "finish_ms_R": loop.finish_ms_R,
            "preemptions": loop.preemptions,
            "itl_ms": loop.itl_ms(),
            "prefix_hit_rate": loop.prefix_hit_rate,
            "log": StepLog(
                run.config_id,
                server.plans,
                np.array(server.durations_ms),
                np.array(server.began_ms),
                tokens,
            ),
        }
    return record


def _prepare_layers(context: RankContext, run: Run, planner: StepPlanner) -> tuple[RankRecord, Execute]:
    """Scope moe_layers: check and warm up on prompt tokens of the first requests."""
    stack = Stack(context, run)
    routed = planner.route(*_sample_step(run))
    record = RankRecord(*check_step(stack, routed, stack.inputs(routed)), core=stack.core)
    for _ in range(int(run.cfg["measure"]["warmup"])):
        stack.execute(stack.inputs(planner.route(*_sample_step(run))), barrier_each_layer=False)
    return record, lambda plan, routed: stack.execute(stack.inputs(routed), barrier_each_layer=False)


def _prepare_full(context: RankContext, run: Run, planner: StepPlanner) -> tuple[RankRecord, Execute]:
    """Scope full_model: the same for the whole forward pass; the check runs each kind of step once."""
    from .check import check_full
    from .full_model import FullModel

    full = FullModel(context, run)
    record = RankRecord(*check_full(full, planner), core=full.core)
    for _ in range(int(run.cfg["measure"]["warmup"])):
        check_full(full, planner)
    return record, full.step


def _sample_step(run: Run) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Prompt tokens of the first requests, dealt to the queues in turn: a step to check and to warm up with."""
    limit = min(int(run.cfg["serving"]["max_batch_tokens"]), 512)
    rows, queues, total = [], [], 0
    for i, request in enumerate(run.workload.requests):
        count = min(request.prompt_len, limit - total)
        rows.append(request.rows(count))
        queues.append(np.full(count, i % run.ep_size))
        total += count
        if total >= limit:
            break
    return np.concatenate(rows), np.concatenate(queues) if run.spec.flow == "dp" else None


def _broadcast_plan(plan: StepPlan | None) -> StepPlan | None:
    """Rank 0's plan on every rank (index -1: none, the run is over)."""
    head = torch.tensor([-1, 0] if plan is None else [plan.index, len(plan.rank_N)], dtype=torch.int64)
    dist.broadcast(head, src=0)
    index, entries = (int(x) for x in head)
    if index < 0:
        return None
    columns = torch.empty(COLUMNS, entries, dtype=torch.int64)
    if plan is not None:
        stacked = np.stack([plan.rank_N, plan.request_N, plan.phase_N, plan.start_N, plan.count_N])
        columns.copy_(torch.from_numpy(stacked))
    dist.broadcast(columns, src=0)
    return StepPlan(index, *columns.numpy()) if plan is None else plan
