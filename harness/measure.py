"""Measure one configuration on a pool of ranks: check, warm up, execute every step, make the result row.

Workload "batches": the run's fixed batches, a barrier before every layer. Workload "serve": see `serving/serve.py`.
Times are maxima over ranks of each (step, layer), then percentiles. The timed layer is what one rank does: gate,
permute, (srs,) dispatch, experts, combine, (sag), and the homes of the tokens where the flow plans them per layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.rows import locality_columns
from semmoe.run import Run
from semmoe.serving.columns import served_columns
from semmoe.serving.steplog import StepLog

from .blocks.check import check_blocks, checked_tokens
from .blocks.head_shard import HeadShard
from .blocks.stack import BlockStack
from .check import check_step
from .counting import traffic_of
from .device.graph import ON, GraphStack, graph_column
from .device.plan import planned_on, planner_of
from .environment import environment, gpu_libraries, gpu_state
from .links import PortMeter, link_of
from .pool import Pool
from .record import RankRecord, no_collection, time_columns, times_ms
from .serving.serve import measure_serve
from .stack import Stack, flush_mb
from .transport.choose import kernel_path, rank_device
from .transport.symmetric_checks import require_symmetric
from .worker import RankContext


def measure_batches(context: RankContext, run: Run) -> RankRecord:
    """Task of every rank: check the first batch, warm up, then time every batch once."""
    device = rank_device(run.cfg["transport"]["name"], context.ranks)
    whole = run.scope == "full_model"
    stack = (GraphStack if graph_column(run, device) == ON else BlockStack if whole else Stack)(context, run)
    planner = planner_of(run)
    steps = list(run.batch_steps())
    if isinstance(stack, BlockStack):
        rows_T, queue_T = steps[0]
        first = slice(checked_tokens(stack))
        routed = planner.route(rows_T[first], None if queue_T is None else queue_T[first])
        checked = check_blocks(stack, routed, stack.inputs(routed))
    else:
        routed = planner.route(*steps[0])
        checked = check_step(stack, routed, stack.inputs(routed))
    record = RankRecord(*checked, core=stack.core)
    warmup = int(run.cfg["measure"]["warmup"])
    with no_collection():
        for i in range(warmup):
            stack.execute(stack.inputs(planner.route(*steps[i % len(steps)])), barrier_each_layer=True)
        for done, (rows_T, queue_T) in enumerate(steps, 1):
            record.add(stack, planner.route(rows_T, queue_T), barrier_each_layer=True)
            context.progress(done, len(steps))
    return record


class Measured(NamedTuple):
    """Of one run: its result row, the log of a served run's step plans, and raw times (record.times_ms)."""

    row: dict[str, Any]
    log: StepLog | None
    times: dict[str, NDArray[np.float64]]


def measure_run(pool: Pool, run: Run, progress: Callable[[int, int], None] | None = None) -> Measured:
    """Execute one run on the pool.

    Raises UserError (RankError) when a rank fails or its output is wrong.
    """
    check_measurable(run)
    transport, kernels, where = how_measured(run, pool.ranks)
    graph = graph_column(run, rank_device(transport, pool.ranks))
    on_gpu = "GPU" in where
    link_gbps, link = link_of(pool, where)
    gpus_before = gpu_state() if on_gpu else []
    task = measure_serve if run.kind == "serve" else measure_batches
    records: list[RankRecord] = pool.run(task, run, progress=progress)
    row = run.identity("harness", transport, kernels)
    meter, ports = run.meter(), PortMeter()
    for step in range(len(records[0].step_ns_S)):
        traffic = traffic_of([record.counters_S[step] for record in records])
        meter.add(traffic)
        ports.add(traffic)
    row |= locality_columns(meter, "measured")
    times = times_ms(records, planned_per_layer=run.spec.flow == "tp_shuffled")
    row |= time_columns(times, seed=int(run.cfg["seed"]))
    row |= ports.columns(row, link_gbps, link)
    served = records[0].extra
    if served:
        row |= served_columns(
            run.workload.requests,
            served["first_token_ms_R"],
            served["finish_ms_R"],
            served["preemptions"],
            run.cfg["slo"],
            served["itl_ms"],
            served["prefix_hit_rate"],
        )
    gpus = {**gpu_libraries(), "gpu_state_before": gpus_before, "gpu_state_after": gpu_state()} if on_gpu else {}
    row |= {
        "environment": json.dumps(environment(pool.ranks, where) | gpus, sort_keys=True),
        "flush_mb": flush_mb(run),
        "cuda_graph": graph,
        "planned_on": planned_on(run),
        "provenance": f"measured on {pool.ranks} {where}, {transport} transport, {'CUDA graph' if graph == ON else 'eager'}",
        "output_error": records[0].output_error,
        "route_flips": records[0].route_flips,
    }
    return Measured(row, served.get("log"), times)


def check_measurable(run: Run) -> None:
    """UserError for what only the simulator does."""
    if run.cfg["routing"] == "expected":
        raise UserError("routing=expected replaces routes, which a measurement needs; leave it out")
    planned_on(run)
    if flush_mb(run) and run.kind == "serve":
        raise UserError("measure.flush_mb: a served run's caches are as its steps leave them; set it to 0")
    if run.scope == "full_model":
        HeadShard(run.model, 0, 1 if run.spec.flow == "dp" else run.ep_size)  # whether ranks can share the heads
        if run.spec.flow != "dp" and run.planner().rehomes:
            raise UserError(
                "a token scheduler that re-homes moves outputs, not residual rows; set scope=moe_layers or another "
                "token_scheduler"
            )
    for key in ("prefill_ranks", "two_batch_overlap") if run.kind == "serve" else ():
        if run.cfg["serving"][key]:
            raise UserError(f"serving.{key}={run.cfg['serving'][key]} can be simulated, not measured; leave it out")
    cached = run.kind == "serve" and run.cfg["serving"]["prefix_block_tokens"]
    if cached and run.scope == "full_model" and any(r.prefix_ids for r in run.workload.requests):
        raise UserError(
            "measured requests of scope=full_model keep no KV for others: set serving.prefix_block_tokens=0 (no prefix "
            "cache), or scope=moe_layers, where hits shorten the prefill"
        )


def is_virtual(run: Run) -> bool:
    """Whether its ranks are threads of one process."""
    return bool(run.cfg["transport"]["name"] == "virtual")


def how_measured(run: Run, ranks: int) -> tuple[str, str, str]:
    """(transport, kernel path, what the ranks are) of the rows of a run; UserError for what must not be timed."""
    named = run.cfg["transport"]
    if named["name"] == "symmetric":
        require_symmetric(ranks)
    device = rank_device(named["name"], ranks)
    if is_virtual(run):
        if run.kind == "serve":
            raise UserError("transport=virtual runs fixed batches only; set workload=batches")
        where = f"virtual ranks on one {'GPU' if device.type == 'cuda' else 'CPU'}"
    else:
        where = "GPUs" if device.type == "cuda" else "CPU processes"
    return str(named["name"]), kernel_path(named, device), where
