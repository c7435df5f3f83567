"""What the command line starts: `simulate(run)` gives the result row of one configuration."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import block_diag

from semmoe.errors import UserError
from semmoe.results import TIMED, summary_ms
from semmoe.rows import locality_columns
from semmoe.run import Run
from semmoe.serving import TokenRows
from semmoe.serving.columns import served_columns
from semmoe.serving.steplog import StepLog, step_log_path
from semmoe.specs import ClusterSpec, check_fits

from .cost.model import CostModel
from .disaggregated import Disaggregated, simulate_disaggregated
from .engine import replay, simulate_batches, simulate_serving
from .kv_link import KvLink
from .kv_move import kv_move_columns
from .replacement import Replacing, ReplacingTimer, loop_for, simulate_without
from .step_timer import StepTimer, Timeline
from .timeline_trace import KEPT_STEPS, step_timeline
from .traffic_source import ExpectedTraffic


def simulate(run: Run) -> dict[str, Any]:
    """The row of a run: its fixed batches, its served workload, or (replay=FOLDER) the step plans of a measured run."""
    row = run.identity("simulator", "modelled", "cost_model")
    show = multiprocessing.parent_process() is None  # bars of several workers would overwrite each other
    if run.kind == "serve" and not run.cfg.get("replay"):
        columns, timers = serve(run, show)
        row |= columns
    else:
        timer = step_timer(run)
        timers = [timer]
        if run.kind == "batches":
            simulate_batches(run.batch_steps(), timer, show)
            heads = timer.heads if isinstance(timer, ReplacingTimer) else run.heads
            row |= kv_move_columns(run, heads) if heads is not None else {}
        else:
            log = load_log(run)
            replay(log.plans, log.tokens, run.ep_size if run.spec.flow == "dp" else 1, timer)
            row["steps_file"] = step_log_path(run.cfg["replay"], run.config_id, run.repeat).name
    for timer in timers:
        if isinstance(timer, ReplacingTimer):
            row |= timer.columns()
    timelines = [timer.timeline for timer in timers]
    row |= pooled([locality_columns(timeline.meter, "replayed") for timeline in timelines])
    row |= {"provenance": told(timers, run), "step_timeline": step_timeline(timelines[-1], timers[-1].cost)}
    return row | time_columns(timelines)


def serve(run: Run, show: bool = False) -> tuple[dict[str, Any], list[StepTimer]]:
    """Serving columns of a run and the timer of each of its pools: one, or two where prefill and decode are apart."""
    slo = run.cfg["slo"]
    if run.pools is None:
        timer = step_timer(run)
        without = simulate_without(run, timer, show) if isinstance(timer, ReplacingTimer) else None
        loop = loop_for(run, timer)
        simulate_serving(loop, timer, show)
        if without is not None and isinstance(timer, ReplacingTimer):
            timer.compare(without)
        times = (loop.first_token_ms_R, loop.finish_ms_R, loop.preemptions)
        return served_columns(loop.requests, *times, slo, loop.itl_ms(), loop.prefix_hit_rate), [timer]
    prefill, decode = run.pools
    loops = (prefill.serving_loop(prompts_only=True), decode.serving_loop())
    link = KvLink(run.cluster, run.model, prefill.ep_size, decode.ep_size)
    service = Disaggregated(run.workload.requests, *loops, link)
    timers = (step_timer(prefill), step_timer(decode))
    simulate_disaggregated(service, *timers, show)
    return service.served(slo), list(timers)


def step_timer(run: Run) -> StepTimer:
    """Planner, cost model and meter of a run. UserError where a full model does not fit into the cluster's memory."""
    if run.pools is not None:
        raise UserError(
            "serving.prefill_ranks: prefill and decode ranks have steps of their own; simulate and slo know both"
        )
    full_model = run.scope == "full_model"
    if full_model:
        attention_tp = 1 if run.spec.flow == "dp" else run.ep_size
        check_fits(run.model, run.cluster, run.recipe.slots // run.ep_size, attention_tp)
    allow = bool(run.cfg["cost"]["allow_roofline"])
    fidelity, graphs = str(run.cfg["cost"]["fidelity"]), str(run.cfg["cost"]["cuda_graphs"])
    shape = (run.model, priced_cluster(run), run.spec, run.ep_size, run.recipe.slots)
    cost = CostModel(*shape, allow, fidelity, graphs, run.planned_by, run.kind == "batches")
    replacing = Replacing(**run.cfg["replacement"])
    if replacing.every_steps:
        return replacing_timer(run, cost, replacing, full_model)
    overlap = run.kind == "serve" and bool(run.cfg["serving"]["two_batch_overlap"])
    source = expected_traffic(run, cost) if run.cfg["routing"] == "expected" else None
    timer = StepTimer(run.planner(), cost, run.meter(), full_model, run.kind == "batches", overlap, source)
    timer.form = run.batch_form if run.kind == "batches" else timer.form
    timer.timeline.keep_traffic = KEPT_STEPS
    return timer


def replacing_timer(run: Run, cost: CostModel, replacing: Replacing, full_model: bool) -> ReplacingTimer:
    """A timer that places anew on the way. UserError beside options that it does not go with."""
    others = {
        "routing=expected": run.cfg["routing"] == "expected",
        "serving.two_batch_overlap": run.kind == "serve" and bool(run.cfg["serving"]["two_batch_overlap"]),
    }
    for words in (words for words, set_ in others.items() if set_):
        raise UserError(f"replacement.every_steps does not go with {words}; set it to 0 or leave that")
    timer = ReplacingTimer(run, cost, replacing, full_model)
    timer.timeline.keep_traffic = KEPT_STEPS
    return timer


def expected_traffic(run: Run, cost: CostModel) -> ExpectedTraffic:
    """Rates of the run's held-out part under its policies: on the training part, which they have seen, they look better.

    Requests of a served run get their homes one by one, as a queue has them, and not all at once as batches do."""
    rank_R = (
        run.recipe.request_ranks(run.fitted, run.heldout, window=int(run.kind == "serve"))
        if run.spec.flow == "dp"
        else None
    )
    return ExpectedTraffic(run.planner(), rank_R, cost.network.wiring)


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


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Locality columns over all pools: counts and bytes added up, pairs of ranks side by side (none between pools), the
    rest averaged over tokens."""
    if len(rows) == 1:
        return rows[0]
    weights = [row["tokens"] for row in rows]
    made: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values: list[Any] = [row.get(name) for row in rows]
        if name in ("tokens", "steps") or name.endswith("_bytes"):
            made[name] = sum(value or 0 for value in values)
        elif any(value is None for value in values):
            made[name] = None
        elif name.endswith("_pairs"):
            made[name] = json.dumps(block_diag(*map(json.loads, values)).tolist())
        elif isinstance(values[0], str):  # a JSON list over layers
            lists = np.array([json.loads(value) for value in values], dtype=np.float64)
            made[name] = json.dumps(np.average(lists, axis=0, weights=weights).round(6).tolist())
        else:
            made[name] = float(np.average(values, weights=weights))
    return made


def time_columns(timelines: Sequence[Timeline]) -> dict[str, float]:
    """Mean and percentiles of every phase over (step, layer), and of whole steps, of all pools."""
    columns: dict[str, float] = {}
    for name in TIMED:
        columns |= summary_ms(name, np.concatenate([timeline.phase_ms(name) for timeline in timelines]))
    return columns


def told(timers: Sequence[StepTimer], run: Run) -> str:
    """The provenance column: sources of the times, and whether the batches were formed by a measured run."""
    words = {word for timer in timers for word in timer.cost.provenance().split(", ")}
    source = ", ".join(sorted(words | ({"expected_routing"} if run.cfg["routing"] == "expected" else set())))
    return f"{source}; step plans of {run.cfg['replay']}" if run.cfg.get("replay") and run.kind == "serve" else source
