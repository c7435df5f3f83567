"""RankRecord: what a rank brings back from a measured run, and the time columns that all ranks' records give."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.planning import RoutedStep
from semmoe.results import summary_ms

from .counting import Counter
from .stack import Stack, StepResult
from .timing import PHASES

BOOTSTRAP_DRAWS = 1000


@dataclass
class RankRecord:
    """What one rank brings back: per step S and layer L, in nanoseconds; counters per step. `extra`: rank 0's own."""

    output_error: float
    route_flips: float | None
    plan_ns_S: list[int] = field(default_factory=list)
    step_ns_S: list[int] = field(default_factory=list)
    layer_ns_SL: list[list[int]] = field(default_factory=list)
    laps_ns_SL: list[list[dict[str, int]]] = field(default_factory=list)
    counters_S: list[Counter] = field(default_factory=list)
    attention_ns_SL: list[list[int]] = field(default_factory=list)  # full_model only
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, stack: Stack, routed: RoutedStep, barrier_each_layer: bool) -> int:
        """Execute a step and record it; returns its nanoseconds, planning included."""
        return self.keep(stack.execute(stack.inputs(routed), barrier_each_layer), routed, barrier_each_layer)

    def keep(self, result: StepResult, routed: RoutedStep, barrier_each_layer: bool) -> int:
        """Record an executed step; returns its nanoseconds, planning included."""
        plan_ns = int(routed.planning_s * 1e9)
        step_ns = plan_ns + (sum(result.layer_ns_L) if barrier_each_layer else result.step_ns)
        self.plan_ns_S.append(plan_ns)
        self.step_ns_S.append(step_ns)
        self.layer_ns_SL.append(result.layer_ns_L)
        self.laps_ns_SL.append(result.laps_ns)
        self.counters_S.append(result.counter)
        if result.attention_ns_L:
            self.attention_ns_SL.append(result.attention_ns_L)
        return step_ns


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of timed code."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_columns(records: list[RankRecord], planned_per_layer: bool, seed: int = 0) -> dict[str, float]:
    """Columns of phases, layer and step. Maximum over ranks first, then mean and percentiles over (step, layer).

    planned_per_layer: the planner chose homes layer by layer, so its time (an even share of the step's) is in the layer.
    """
    layer_GSL = np.array([r.layer_ns_SL for r in records], dtype=np.float64) / 1e6
    plan_GS = np.array([r.plan_ns_S for r in records], dtype=np.float64) / 1e6
    step_GS = np.array([r.step_ns_S for r in records], dtype=np.float64) / 1e6
    layers = max(layer_GSL.shape[2], 1)
    share_GSL = np.repeat(plan_GS[:, :, None] / layers, layers, axis=2)
    if planned_per_layer:
        layer_GSL = layer_GSL + share_GSL
    columns: dict[str, float] = {}
    known_GSL = share_GSL if planned_per_layer else np.zeros_like(layer_GSL)
    for phase in PHASES:
        phase_GSL = _laps_ms(records, phase)
        known_GSL = known_GSL + phase_GSL
        if phase == "plan":
            phase_GSL = phase_GSL + share_GSL
        if phase_GSL.any():
            columns |= summary_ms(phase, phase_GSL.max(axis=0).ravel())
    columns |= summary_ms("other", np.maximum(layer_GSL - known_GSL, 0.0).max(axis=0).ravel())
    if records[0].attention_ns_SL:
        attention_GSL = np.array([r.attention_ns_SL for r in records], dtype=np.float64) / 1e6
        columns |= summary_ms("attention", attention_GSL.max(axis=0).ravel())
    slowest_SL = layer_GSL.max(axis=0)
    low, high = bootstrap_mean(slowest_SL.mean(axis=1), seed)
    columns |= summary_ms("layer", slowest_SL.ravel()) | {"layer_ms_ci_low": low, "layer_ms_ci_high": high}
    step_S = step_GS.max(axis=0)
    columns |= {
        f"{name}_ms_p10": float(np.quantile(v, 0.1)) for name, v in (("layer", slowest_SL), ("step", step_S)) if v.size
    }
    return columns | summary_ms("step", step_S)


def _laps_ms(records: list[RankRecord], phase: str) -> NDArray[np.float64]:
    laps = [[[layer[phase] for layer in step] for step in r.laps_ns_SL] for r in records]
    return np.array(laps, dtype=np.float64) / 1e6


def bootstrap_mean(values_S: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % interval of the mean over steps, by resampling whole steps (their layers are not independent)."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(values_S), (BOOTSTRAP_DRAWS, len(values_S)))
    low, high = np.quantile(values_S[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
