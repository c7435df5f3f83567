"""RankRecord: what a rank brings back from a measured run, and the times and their columns that all ranks' records give."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.files import replacing
from semmoe.planning import RoutedStep
from semmoe.results import WAITS, summary_ms

from .counting import Counter
from .critical_path import attribute, clock_id
from .stack import Stack, StepResult
from .timing import PHASES, Marks, laps_of

BOOTSTRAP_DRAWS = 1000
Float = NDArray[np.float64]


@dataclass
class RankRecord:
    """What one rank brings back: per step S and layer L, in nanoseconds; counters per step. `extra`: rank 0's own."""

    output_error: float
    route_flips: float | None
    plan_ns_S: list[int] = field(default_factory=list)
    step_ns_S: list[int] = field(default_factory=list)
    layer_ns_SL: list[list[int]] = field(default_factory=list)
    marks_SL: list[list[Marks]] = field(default_factory=list)
    counters_S: list[Counter] = field(default_factory=list)
    attention_ns_SL: list[list[int]] = field(default_factory=list)  # full_model only
    core: int | None = None  # the only one that this rank computes on
    clock: str = field(default_factory=clock_id)
    barrier_each_layer: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, stack: Stack, routed: RoutedStep, barrier_each_layer: bool) -> int:
        """Execute a step and record it; returns its nanoseconds, planning included."""
        return self.keep(stack.execute(stack.inputs(routed), barrier_each_layer), routed, barrier_each_layer)

    def keep(self, result: StepResult, routed: RoutedStep, barrier_each_layer: bool) -> int:
        """Record an executed step; returns its nanoseconds, planning included."""
        plan_ns = int(routed.planning_s * 1e9)
        step_ns = plan_ns + result.step_ns
        self.plan_ns_S.append(plan_ns)
        self.step_ns_S.append(step_ns)
        self.layer_ns_SL.append(result.layer_ns_L)
        self.marks_SL.append(result.marks_L)
        self.barrier_each_layer = barrier_each_layer
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


def times_ms(records: list[RankRecord], planned_per_layer: bool) -> dict[str, Float]:
    """Milliseconds by name: [S, L] of phases, waiting, attention and "layer", [S] of "step".

    Layer and step: maximum over ranks. Phases: on the critical path, so they add up to the layer, waiting apart
    (critical_path.py); where the ranks have no clock in common (several machines) or no marks (a CUDA graph), the slowest
    rank of each phase, its waiting included, and none of waiting.
    planned_per_layer: the planner chose homes layer by layer, so its time (an even share of the step's) is in the layer.
    """
    layer_GSL = np.array([r.layer_ns_SL for r in records], dtype=np.float64) / 1e6
    plan_GS = np.array([r.plan_ns_S for r in records], dtype=np.float64) / 1e6
    step_GS = np.array([r.step_ns_S for r in records], dtype=np.float64) / 1e6
    slowest_SL = layer_GSL.max(axis=0)
    phases_SL = _on_the_path(records) if _share_a_clock(records) else _slowest_of_each(records)
    waits_SL = {name: phases_SL.pop(name) for name in WAITS if name in phases_SL}
    if waits_SL and not records[0].barrier_each_layer:  # a layer begins when the one before has ended everywhere
        slowest_SL = np.sum(list(phases_SL.values()), axis=0)
    elif slowest_SL.size:
        phases_SL["other"] = np.maximum(slowest_SL - np.sum(list(phases_SL.values()), axis=0), 0.0)
    share_SL = plan_GS.max(axis=0)[:, None] / max(slowest_SL.shape[1], 1)
    phases_SL["plan"] = phases_SL["plan"] + share_SL
    if planned_per_layer:
        slowest_SL = slowest_SL + share_SL
    found = {name: ms_SL for name, ms_SL in phases_SL.items() if ms_SL.any()} | waits_SL
    if records[0].attention_ns_SL:
        attention_GSL = np.array([r.attention_ns_SL for r in records], dtype=np.float64) / 1e6
        found["attention"] = attention_GSL.max(axis=0)
    return found | {"layer": slowest_SL, "step": step_GS.max(axis=0)}


def time_columns(times: dict[str, Float], seed: int = 0) -> dict[str, float]:
    """Columns of `times_ms`: mean and percentiles over (step, layer), and a 95 % interval of the layer's mean."""
    columns: dict[str, float] = {}
    for name, ms in times.items():
        columns |= summary_ms(name, ms.ravel())
    low, high = bootstrap_mean(times["layer"].mean(axis=1), seed)
    return columns | {"layer_ms_ci_low": low, "layer_ms_ci_high": high}


def save_times(path: Path, times: dict[str, Float]) -> Path:
    """Write the raw times of a run atomically as .npz without pickles: an array of fp32 milliseconds by name."""
    with replacing(path) as file:
        np.savez_compressed(file, **{name: ms.astype(np.float32) for name, ms in times.items()})  # type: ignore[arg-type]
    return path


def _share_a_clock(records: list[RankRecord]) -> bool:
    """Whether the marks of all ranks can be laid beside each other: of one machine, and with phases in every layer."""
    marked = all(len(marks) > 1 for record in records for marks_L in record.marks_SL for marks in marks_L)
    return marked and len({record.clock for record in records}) == 1


def _on_the_path(records: list[RankRecord]) -> dict[str, Float]:
    """Milliseconds [S, L] of the phases on the critical path and of waiting."""
    cores: list[Hashable] = [("rank", g) if r.core is None else r.core for g, r in enumerate(records)]
    parts_S = []
    for marks_GL in zip(*(record.marks_SL for record in records), strict=True):
        windows = zip(*([[marks] for marks in marks_L] for marks_L in marks_GL), strict=True)
        parts = [attribute(w, cores) for w in (windows if records[0].barrier_each_layer else [marks_GL])]
        found = {phase: np.concatenate([part.path_L[phase] for part in parts]) for phase in PHASES}
        found["wait"] = np.concatenate([part.wait_L for part in parts])
        if len(set(cores)) < len(cores):
            found["core_wait"] = np.concatenate([part.core_wait_L for part in parts])
        parts_S.append(found)
    return {name: np.array([part[name] for part in parts_S]) / 1e6 for name in parts_S[0]} if parts_S else {}


def _slowest_of_each(records: list[RankRecord]) -> dict[str, Float]:
    """Milliseconds [S, L] of every phase on its own slowest rank."""
    laps_GSL = [[[laps_of(marks) for marks in marks_L] for marks_L in r.marks_SL] for r in records]
    return {
        phase: np.array([[[laps[phase] for laps in laps_L] for laps_L in laps_SL] for laps_SL in laps_GSL]).max(axis=0)
        / 1e6
        for phase in PHASES
    }


def bootstrap_mean(values_S: Float, seed: int) -> tuple[float, float]:
    """95 % interval of the mean over steps, by resampling whole steps (their layers are not independent)."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(values_S), (BOOTSTRAP_DRAWS, len(values_S)))
    low, high = np.quantile(values_S[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
