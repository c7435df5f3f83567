"""What the command line starts: `simulate(run)` gives the result row of one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.errors import UserError
from semmoe.results import TIMED, summary_ms
from semmoe.rows import locality_columns
from semmoe.run import Run
from semmoe.served import served_columns
from semmoe.serving import ServingLoop, TokenRows
from semmoe.specs import ClusterSpec, check_fits
from semmoe.steplog import StepLog, step_log_path

from .cost.model import CostModel
from .engine import StepTimer, Timeline, replay, simulate_batches, simulate_serving
from .timeline_trace import KEPT_STEPS, step_timeline


def simulate(run: Run) -> dict[str, Any]:
    """The row of a run: its fixed batches, its served workload, or (replay=FOLDER) the step plans of a measured run."""
    timer = step_timer(run)
    timer.timeline.keep_traffic = KEPT_STEPS
    row = run.identity("simulator", "modelled", "cost_model")
    if run.kind == "batches":
        timeline = simulate_batches(run.batch_steps(), timer, show=True)
    elif run.cfg.get("replay"):
        log = load_log(run)
        queues = run.ep_size if run.spec.flow == "dp" else 1
        timeline = replay(log.plans, log.tokens, queues, timer)
        row["steps_file"] = step_log_path(run.cfg["replay"], run.config_id, run.repeat).name
    else:
        loop = run.serving_loop()
        timeline = simulate_serving(loop, timer, show=True)
        row |= served(loop, run.cfg["slo"])
    row |= {"provenance": told(timer, run), "step_timeline": step_timeline(timeline, timer.cost)}
    return row | locality_columns(timeline.meter, "replayed") | time_columns(timeline)


def served(loop: ServingLoop, slo: Mapping[str, float]) -> dict[str, Any]:
    """Serving columns of a finished loop."""
    times = (loop.first_token_ms_R, loop.finish_ms_R, loop.preemptions)
    return served_columns(loop.requests, *times, slo, loop.itl_ms(), loop.prefix_hit_rate)


def step_timer(run: Run) -> StepTimer:
    """Planner, cost model and meter of a run. UserError where a full model does not fit into the cluster's memory."""
    full_model = run.scope == "full_model"
    if full_model:
        attention_tp = 1 if run.spec.flow == "dp" else run.ep_size
        check_fits(run.model, run.cluster, run.recipe.slots // run.ep_size, attention_tp)
    allow = bool(run.cfg["cost"]["allow_roofline"])
    fidelity = str(run.cfg["cost"]["fidelity"])
    cost = CostModel(run.model, priced_cluster(run), run.spec, run.ep_size, run.recipe.slots, allow, fidelity)
    return StepTimer(run.planner(), cost, run.meter(), full_model, barrier_each_layer=run.kind == "batches")


def priced_cluster(run: Run) -> ClusterSpec:
    """The run's cluster, with the figures of the measured database that `cost.silicon` names."""
    system = run.cfg["cost"].get("silicon")
    if not system:
        return run.cluster
    from .silicon import silicon_cluster  # an optional extra

    return silicon_cluster(run.cluster, run.model, str(system), bool(run.cfg["cost"]["allow_roofline"]))


def load_log(run: Run) -> StepLog:
    """The step log of the same configuration in the folder that `replay` names."""
    folder = Path(str(run.cfg["replay"]))
    log = StepLog.load(step_log_path(folder, run.config_id, run.repeat))
    start_R = TokenRows.of(run.workload.requests).start_R
    if log.config_id != run.config_id or not np.array_equal(log.tokens.start_R, start_R):
        raise UserError(
            f"{folder}: the step log is of configuration {log.config_id} over other requests than this run's "
            f"({run.config_id}); replay with the overrides that the run was measured with"
        )
    return log


def time_columns(timeline: Timeline) -> dict[str, float]:
    """Mean and percentiles of every phase over (step, layer), and of whole steps."""
    columns: dict[str, float] = {}
    for name in TIMED:
        columns |= summary_ms(name, timeline.phase_ms(name))
    return columns


def told(timer: StepTimer, run: Run) -> str:
    """The provenance column: sources of the times, and whether the batches were formed by a measured run."""
    source = timer.cost.provenance()
    return f"{source}; step plans of {run.cfg['replay']}" if run.cfg.get("replay") and run.kind == "serve" else source
