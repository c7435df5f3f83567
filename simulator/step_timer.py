"""StepTimer: routes, counts and prices the steps of a run, one at a time or many ahead, and keeps them in a Timeline.

StepPlan ──TrafficSource──> Traffic ──CostModel──> times of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from semmoe.batch_form import BatchForm
from semmoe.planning import StepPlanner
from semmoe.serving import StepPlan, Stretch, TokenRows
from semmoe.traffic import Traffic, with_collectives
from semmoe.traffic.locality import LocalityMeter

from .cost.attention import AttentionLoad
from .cost.model import CostModel
from .layer import LayerTimes, StepTimes, time_layers, time_steps
from .overlap import halves, overlapped
from .traffic_source import TracedTraffic, TrafficSource

Float = NDArray[np.float64]


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
        arrays = [s.layer_ms_L if name == "layer" else (s.phases_L | s.waits_L).get(name, np.zeros(0)) for s in steps]
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
    barrier_each_layer: see time_layers. `form`: sequences of fixed batches.
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
        self.form = BatchForm()
        self.source = source or TracedTraffic(planner, cost.spec, cost.network.wiring)
        plain = planner.spec.flow == "dp" and not planner.placement.has_replicas and cost.network.wiring.nodes == 1
        self._can_run_ahead = plain and not overlap
        self._ahead: tuple[Stretch, Traffic, StepTimes, NDArray[np.int64]] | None = None

    def run(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> Traffic:
        """One forward pass over these rows of the trace; its times are appended to the timeline."""
        return self._price(self.source.of_rows(rows_T, queue_T), load)

    def batch_load(self, tokens: int, queue_T: NDArray[np.integer] | None) -> AttentionLoad | None:
        """Attention of a fixed batch in the form of the workload; None: attention is no part of the scope."""
        if not self.full_model:
            return None
        counts_G = [tokens] if queue_T is None else np.bincount(queue_T, minlength=self.planner.ranks).tolist()
        return AttentionLoad.of(self.form.plan(counts_G), len(counts_G))

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
            outside_ms = 0.0
            if self.full_model:
                outside_ms = float(self.cost.outside_layers(AttentionLoad.of(step, queues)))
            dense_layers = self.cost.model.num_layers - self.cost.model.num_moe_layers
            self.timeline.steps.append(overlapped(a, b, dense_layers, outside_ms))
        self.timeline.plans.append(step)
        self.timeline.idle_rank_steps += int((np.bincount(step.rank_N, minlength=queues) == 0).sum())
        return self.timeline.steps[-1]
