"""Discrete-event simulation of a served workload, and of fixed batches, over the shared core's state machines.

    arrivals ──submit──> ServingLoop ──StepPlan──> StepPlanner ──routes──> Traffic ──CostModel──> duration ──> complete

Simulated time is simpy's, in milliseconds. All ranks of attention-DP step together: a step lasts as long as its slowest
rank in every phase, and ranks without a request take part with no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from semmoe.locality import LocalityMeter
from semmoe.planning import StepPlanner
from semmoe.serving import Request, ServingLoop, StepPlan, Stretch, TokenRows
from semmoe.traffic import Traffic, with_collectives

from .cost.attention import AttentionLoad
from .cost.model import CostModel
from .layer import LayerTimes, StepTimes, time_layers, time_steps
from .overlap import halves, overlapped
from .traffic_source import TracedTraffic, TrafficSource

Float = NDArray[np.float64]
Event = Generator[Any, Any, None]
MOST_AHEAD = 64  # steps priced at once


@dataclass(eq=False)
class Timeline:
    """What happened: `steps` and `plans`, one a step, in order, with the time that it started at. `idle_rank_steps`: (step,
    rank) pairs without a token. `traffic` is kept of the first `keep_traffic` steps only (simulator/timeline_trace.py)."""

    meter: LocalityMeter
    start_ms: list[float] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    keep_traffic: int = 0
    idle_rank_steps: int = 0
    end_ms: float = 0.0
    _steps: list[LayerTimes] = field(default_factory=list)
    _plans: list[StepPlan] = field(default_factory=list)
    _stretches: list[tuple[Stretch, StepTimes, int]] = field(default_factory=list)  # not taken apart yet

    @property
    def steps(self) -> list[LayerTimes]:
        self._take_apart()
        return self._steps

    @property
    def plans(self) -> list[StepPlan]:
        self._take_apart()
        return self._plans

    def add(self, stretch: Stretch, times: StepTimes, steps: int) -> None:
        """The first `steps` of a stretch took place. They become steps and plans of their own when somebody asks."""
        self._stretches.append((stretch, times, steps))

    def _take_apart(self) -> None:
        for stretch, times, steps in self._stretches:
            self._steps += times.each(steps)
            self._plans += stretch.plans(steps)
        self._stretches.clear()

    def phase_ms(self, name: str) -> Float:
        """Samples of a phase over all steps and MoE layers; "attention", "layer" and "step" too. Empty: no such phase."""
        steps = self.steps
        if name == "step":
            return np.array([s.step_ms for s in steps])
        if name == "attention":
            return np.array([s.attention_ms for s in steps if s.attention_ms])
        arrays = [s.layer_ms_L if name == "layer" else s.phases_L.get(name, np.zeros(0)) for s in steps]
        return np.concatenate(arrays) if arrays else np.zeros(0)


class Timer(Protocol):
    """What prices the steps of a served run."""

    timeline: Timeline

    def run_ahead(self, stretch: Stretch, tokens: TokenRows, queues: int) -> Sequence[float]:
        """Milliseconds of its first steps, one at least."""
        ...

    def keep(self, steps: int) -> None:
        """So many of them took place; they go into the timeline."""
        ...


class StepTimer:
    """Routes, counts and prices one step. `full_model`: attention, dense layers, head and host are part of it.
    barrier_each_layer: see time_layers.
    overlap: two-batch overlap of step plans (overlap.py). source: of each step's traffic; None: the traced routes."""

    def __init__(
        self,
        planner: StepPlanner,
        cost: CostModel,
        meter: LocalityMeter,
        full_model: bool = False,
        barrier_each_layer: bool = False,
        overlap: bool = False,
        source: TrafficSource | None = None,
    ) -> None:
        self.barrier_each_layer = barrier_each_layer
        self.planner, self.cost, self.full_model, self.overlap = planner, cost, full_model, overlap
        self.timeline = Timeline(meter)
        self.source = source or TracedTraffic(planner, cost.spec, cost.network.wiring)
        plain = planner.spec.flow == "dp" and not planner.placement.has_replicas and cost.network.wiring.nodes == 1
        self._can_run_ahead = plain and not overlap
        self._ahead: tuple[Stretch, Traffic, StepTimes, NDArray[np.int64]] | None = None

    def run(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> Traffic:
        """One forward pass over these rows of the trace; its times are appended to the timeline."""
        return self._price(self.source.of_rows(rows_T, queue_T), load)

    def _price(self, traffic: Traffic, load: AttentionLoad | None) -> Traffic:
        self.timeline.meter.add(traffic)
        if len(self.timeline.traffic) < self.timeline.keep_traffic and not self.overlap:  # halves are no steps
            self.timeline.traffic.append(traffic)
        self.timeline.steps.append(time_layers(self.cost, traffic, load, self.barrier_each_layer))
        return traffic

    def run_ahead(self, stretch: Stretch, tokens: TokenRows, queues: int) -> Sequence[float]:
        """All steps are priced in one go, where homes and slots of a token depend on nothing but its request and its
        experts (flow dp without replicas, one node)."""
        if stretch.steps == 1 or not self._can_run_ahead:
            return [self.run_plan(stretch.first, tokens, queues).step_ms]
        traffic = self.source.of_stretch(stretch, tokens)
        tokens_SG = stretch.tokens_SG(queues)
        load = AttentionLoad.of_stretch(stretch, tokens_SG) if self.full_model else None
        times = time_steps(self.cost, traffic, tokens_SG.sum(axis=1), load)
        self._ahead = stretch, traffic, times, tokens_SG
        return list(times.step_ms_S.tolist())

    def keep(self, steps: int) -> None:
        """Count and record the first `steps` of what run_ahead priced last."""
        if self._ahead is None:
            return
        (stretch, traffic, times, tokens_SG), self._ahead = self._ahead, None
        layers = traffic.num_layers // len(tokens_SG)

        def part(first: int, last: int) -> Traffic:
            if last - first == len(tokens_SG):
                return traffic
            cut = traffic.cut(slice(first * layers, last * layers), int(tokens_SG[first:last].sum()))
            return with_collectives(cut, self.cost.spec)

        self.timeline.meter.add(part(0, steps), steps)
        room = max(self.timeline.keep_traffic - len(self.timeline.traffic), 0)
        self.timeline.traffic += [part(s, s + 1) for s in range(min(steps, room))]
        self.timeline.add(stretch, times, steps)
        self.timeline.idle_rank_steps += int((tokens_SG[:steps] == 0).sum())

    def run_plan(self, step: StepPlan, tokens: TokenRows, queues: int) -> LayerTimes:
        """One forward pass of a StepPlan."""
        parts = halves(step) if self.overlap else None
        for part in parts or (step,):
            load = AttentionLoad.of(part, queues) if self.full_model else None
            self._price(self.source.of_plan(part, tokens), load)
        if parts:
            b, a = self.timeline.steps.pop(), self.timeline.steps.pop()
            outside_ms = self.cost.start()
            if self.full_model:
                outside_ms += float(self.cost.outside_layers(AttentionLoad.of(step, queues)))
            dense_layers = self.cost.model.num_layers - self.cost.model.num_moe_layers
            self.timeline.steps.append(overlapped(a, b, dense_layers, outside_ms))
        self.timeline.plans.append(step)
        self.timeline.idle_rank_steps += int((np.bincount(step.rank_N, minlength=queues) == 0).sum())
        return self.timeline.steps[-1]


class Server:
    """One loop with the ranks that it drives, as a process of simulated time: steps of predicted length, one after the
    other. after_plan() and after_step() are called when a step has been formed and when it is over."""

    def __init__(
        self,
        env: simpy.Environment,
        loop: ServingLoop,
        timer: Timer,
        after_plan: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.env, self.loop, self.timer, self.after_plan, self.after_step = env, loop, timer, after_plan, after_step
        self._work = env.event()
        self._step_ms = 0.0  # of the last step
        env.process(self._steps())

    def submit(self, request: Request, first_token_ms: float | None = None) -> None:
        """Hand a request to the loop now."""
        self.loop.submit(request, self.env.now, first_token_ms)
        self.wake()

    def wake(self) -> None:
        """There may be something to do again."""
        if not self._work.triggered:
            self._work.succeed()

    def _steps(self) -> Event:
        while True:
            step = self.loop.next_step(self.env.now)
            self.after_plan()
            if not isinstance(step, StepPlan):
                self._work = self.env.event()
                yield self._work
                continue
            stretch = self.loop.stretch(self._likely_steps())
            steps_ms = self.timer.run_ahead(stretch, self.loop.tokens, len(self.loop.queues))
            now_ms, ends_ms, event_ms = float(self.env.now), list[float](), self.env.peek()
            for step_ms in steps_ms:
                self.timer.timeline.start_ms.append(now_ms)
                now_ms += step_ms
                ends_ms.append(now_ms)
                if now_ms < event_ms and len(ends_ms) < len(steps_ms):
                    continue  # nothing happens before it ends
                yield self.env.timeout(max(now_ms - self.env.now, 0.0))
                event_ms = self.env.peek()
                if self.loop.pending:
                    break
            self.timer.keep(len(ends_ms))
            self._step_ms = steps_ms[-1]
            self.loop.complete_stretch(stretch, ends_ms)
            self.after_step()

    def _likely_steps(self) -> int:
        """Steps that end before the next arrival, if they last as long as the step before: more would be priced in vain."""
        gap_ms = self.loop.next_arrival_ms() - self.env.now
        if not 0 < gap_ms < MOST_AHEAD * self._step_ms:  # an arrival in the past is with another loop
            return MOST_AHEAD
        return min(int(gap_ms / self._step_ms) + 1, MOST_AHEAD)


def arrivals(env: simpy.Environment, requests: Iterable[Request], submit: Callable[[Request], None]) -> Event:
    """Process that submits every request at its time."""
    for request in sorted(requests, key=lambda r: (r.arrival_ms, r.id)):
        if request.arrival_ms > env.now:
            yield env.timeout(request.arrival_ms - env.now)
        submit(request)


def simulate_serving(loop: ServingLoop, timer: Timer, show: bool = False) -> Timeline:
    """Serve every request of the loop: arrivals at their times, steps of predicted length. show: a progress bar."""
    env = simpy.Environment()
    over = env.event()

    with progress(len(loop.requests), "serving", show) as bar:

        def after_step() -> None:
            bar.update(len(loop.requests) - loop.unfinished - bar.n)
            if loop.done:
                over.succeed()

        env.process(arrivals(env, loop.requests, Server(env, loop, timer, after_step=after_step).submit))
        if not loop.done:
            env.run(until=over)
    timer.timeline.end_ms = float(env.now)
    return timer.timeline


def replay(plans: Iterable[StepPlan], tokens: TokenRows, queues: int, timer: StepTimer) -> Timeline:
    """Re-execute logged step plans: the same batches as the logged run formed, with predicted durations."""
    for step in plans:
        timer.timeline.start_ms.append(timer.timeline.end_ms)
        timer.timeline.end_ms += timer.run_plan(step, tokens, queues).step_ms
    return timer.timeline


def simulate_batches(
    batches: Iterator[tuple[NDArray[np.int64], NDArray[np.integer] | None]], timer: StepTimer, show: bool = False
) -> Timeline:
    """Fixed batches of (rows of the trace, home rank of each row or None), one forward pass each."""
    with progress(None, "batches", show) as bar:
        for rows_T, queue_T in batches:
            timer.timeline.start_ms.append(timer.timeline.end_ms)
            timer.run(rows_T, queue_T, batch_load(len(rows_T), queue_T, timer) if timer.full_model else None)
            timer.timeline.end_ms += timer.timeline.steps[-1].step_ms
            bar.update()
    return timer.timeline


def batch_load(tokens: int, queue_T: NDArray[np.integer] | None, timer: StepTimer) -> AttentionLoad:
    """Attention of a batch of loose tokens: as if each were the first of its prompt (no batch knows its KV lengths)."""
    if queue_T is None:
        count = np.array([float(tokens)])
    else:
        count = np.bincount(queue_T, minlength=timer.planner.ranks).astype(np.float64)
    return AttentionLoad(count, count, count, np.zeros_like(count))


def progress(total: int | None, what: str, show: bool) -> Any:
    """A progress bar on standard error, on a terminal and after two seconds only."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, delay=2, disable=not (show and sys.stderr.isatty()), leave=False)
