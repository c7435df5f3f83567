"""A simulated run to look at: a chrome/Perfetto trace per rank and phase, pair traffic, communication share per layer.

    python -m simulator.timeline_trace [out=results/runs/NAME/trace] [steps=50] [key=value ...]

`trace.json` opens in https://ui.perfetto.dev or chrome://tracing: one track a rank; a phase of own work (gate, permute,
experts) is as long as that rank needs, the gap to the next phase is waiting for the slowest; exchanges and the rest are
the same for all ranks. Counters: running requests, LAR of the step. `traffic.json` holds, over all steps, the
pair matrices [source rank][serving rank] for a heat map (distinct (token, rank) pairs as sent by a deduplicating
dispatcher, and assignments), both also per layer, and each layer's share of time spent in exchanges.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.builder import RunBuilder
from semmoe.errors import UserError
from semmoe.files import write_atomically
from semmoe.inputs import warn_uncalibrated
from semmoe.run import Run
from semmoe.traffic import Traffic

from .cost.model import CostModel
from .engine import simulate_batches, simulate_serving
from .layer import EXCHANGES, PHASES, LayerTimes
from .replacement import loop_for
from .step_timer import StepTimer, Timeline

PROCESS = 1
KEPT_STEPS = 8  # of every run, for the step_timeline column
SHOWN_LAYERS = 3


def recorded(run: Run, steps: int) -> tuple[Timeline, StepTimer]:
    """Simulate the run and keep the traffic of its first `steps` steps."""
    from .app import step_timer

    timer = step_timer(run)
    timer.timeline.keep_traffic = steps
    if run.kind == "batches":
        return simulate_batches(run.batch_steps(), timer), timer
    return simulate_serving(loop_for(run, timer), timer), timer


def trace_events(timeline: Timeline, cost: CostModel) -> list[dict[str, Any]]:
    """Events of the steps whose traffic was kept, in the Trace Event Format; times in microseconds."""
    ranks = cost.ep_size
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(ranks)
    ]
    for index in range(len(timeline.traffic)):
        events += _step(timeline, cost, index)
    return events


def _step(timeline: Timeline, cost: CostModel, index: int) -> Iterator[dict[str, Any]]:
    times, traffic, start_ms = timeline.steps[index], timeline.traffic[index], timeline.start_ms[index]
    plan = timeline.plans[index] if index < len(timeline.plans) else None
    yield _counter("LAR", start_ms, float(traffic.local_assignments_L().sum() / max(traffic.assignments_L().sum(), 1)))
    if plan is not None:
        yield _counter("running requests", start_ms, len(plan.request_N))
    now = start_ms
    for span in layer_spans(times, cost, traffic):
        said = {"step": index, "layer": span.layer, "tokens": traffic.tokens}
        for rank, busy_ms in enumerate(span.busy_ms_G):
            if busy_ms > 0:
                yield _bar(span.phase, rank, start_ms + span.start_ms, busy_ms, said)
        now = start_ms + span.start_ms + span.duration_ms
    rest_ms = start_ms + times.step_ms - now
    for rank in range(cost.ep_size):
        if rest_ms > 1e-9:
            yield _bar("outside MoE layers", rank, now, rest_ms, {"step": index})


@dataclass(frozen=True)
class Span:
    """A phase of one MoE layer of a step: all ranks begin it at start_ms and the next begins duration_ms later;
    rank g works for busy_ms_G[g] of it and waits for the rest."""

    phase: str
    layer: int
    start_ms: float
    duration_ms: float
    busy_ms_G: tuple[float, ...]


def layer_spans(times: LayerTimes, cost: CostModel, traffic: Traffic) -> Iterator[Span]:
    """The phases of all MoE layers of one step in order, from 0 ms on."""
    if not traffic.tokens:
        return
    own, now = cost.by_rank(traffic), 0.0
    for layer in range(traffic.num_layers):
        phases = [("attention", times.attention_ms)] if times.attention_ms else []
        phases += [(name, float(times.phases_L[name][layer])) for name in PHASES if name in times.phases_L]
        for name, duration_ms in phases:
            busy_ms = np.minimum(own[name][layer], duration_ms) if name in own else np.full(cost.ep_size, duration_ms)
            yield Span(name, layer, now, duration_ms, tuple(busy_ms.tolist()))
            now += duration_ms


def step_timeline(timeline: Timeline, cost: CostModel) -> str | None:
    """Column step_timeline: of the kept step with the most tokens, the first SHOWN_LAYERS MoE layers as JSON.

    {"tokens", "layers", "spans": [[phase, layer, start_ms, duration_ms, [busy_ms of every rank]], ...]}
    """
    if not timeline.traffic:
        return None
    index = max(range(len(timeline.traffic)), key=lambda i: timeline.traffic[i].tokens)
    traffic = timeline.traffic[index]
    spans = [
        [s.phase, s.layer, round(s.start_ms, 5), round(s.duration_ms, 5), [round(b, 5) for b in s.busy_ms_G]]
        for s in layer_spans(timeline.steps[index], cost, traffic)
        if s.layer < SHOWN_LAYERS
    ]
    return json.dumps({"tokens": traffic.tokens, "layers": traffic.num_layers, "spans": spans})


def _bar(name: str, rank: int, start_ms: float, duration_ms: float, said: dict[str, Any]) -> dict[str, Any]:
    category = "exchange" if name in EXCHANGES else "compute"
    span = {"ts": round(1e3 * start_ms, 4), "dur": round(1e3 * duration_ms, 4)}
    return {"ph": "X", "name": name, "cat": category, "pid": PROCESS, "tid": rank, **span, "args": said}


def _counter(name: str, start_ms: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": PROCESS, "ts": round(1e3 * start_ms, 4), "args": {name: value}}


def communication_share_L(timeline: Timeline) -> NDArray[np.float64]:
    """Share of each MoE layer's time that is exchange, over all steps; nan where the layer took no time."""
    busy = [step for step in timeline.steps if step.phases_L]
    if not busy:
        return np.zeros(0)
    exchange = sum(step.phases_L[name] for step in busy for name in EXCHANGES if name in step.phases_L)
    whole = np.sum([step.layer_ms_L for step in busy], axis=0)
    return np.divide(exchange, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def traffic_document(timeline: Timeline, cost: CostModel) -> dict[str, Any]:
    """Content of traffic.json."""
    meter = timeline.meter
    share = [None if np.isnan(value) else round(float(value), 5) for value in communication_share_L(timeline)]
    return {
        "rank_pairs": meter.rank_pairs_LGG.sum(axis=0).tolist(),
        "assignment_pairs": meter.assignment_pairs_LGG.sum(axis=0).tolist(),
        "rank_pairs_per_layer": meter.rank_pairs_LGG.tolist(),
        "assignment_pairs_per_layer": meter.assignment_pairs_LGG.tolist(),
        "dispatch_row_bytes": cost.spec.dispatch_row_bytes,
        "combine_row_bytes": cost.spec.combine_row_bytes,
        "communication_share_per_layer": share,
        "steps": len(timeline.steps),
        "tokens": meter.tokens,
    }


def write_trace(folder: Path, timeline: Timeline, cost: CostModel) -> None:
    """trace.json and traffic.json into a folder."""
    trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(timeline, cost)}
    write_atomically(folder / "trace.json", json.dumps(trace))
    write_atomically(folder / "traffic.json", json.dumps(traffic_document(timeline, cost)))


def main(argv: Sequence[str]) -> int:
    """Simulate one configuration and write its trace."""
    from semmoe.config import compose_one

    own = {"out", "steps"}
    given = dict(word.split("=", 1) for word in argv if word.split("=", 1)[0] in own and "=" in word)
    config = compose_one([word for word in argv if word.split("=", 1)[0] not in own] + ["planned_folds=0"])
    steps = given.get("steps", "50")
    if not steps.isdigit() or not int(steps):
        raise UserError(f"steps={steps} must be a whole number of at least 1")
    run = RunBuilder().build(config)
    warn_uncalibrated([config["cluster"]])
    timeline, timer = recorded(run, int(steps))
    folder = Path(given.get("out") or Path(config["results_dir"]) / run.name / "trace")
    write_trace(folder, timeline, timer.cost)
    print(f"{folder}/trace.json: {min(int(steps), len(timeline.steps))} of {len(timeline.steps)} steps")
    print(f"{folder}/traffic.json: pair traffic and communication share per layer")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"timeline_trace: {error}", file=sys.stderr)
        sys.exit(2)
