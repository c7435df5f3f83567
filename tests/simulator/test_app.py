"""simulate(run): whole rows from composed configurations, for every flow, replay included."""

from __future__ import annotations

import json

import numpy as np
import pytest
from composed_runs import BATCHES, SERVE, UNCALIBRATED, build

from semmoe.builder import RunBuilder
from semmoe.dispatch import valid_pairs
from semmoe.errors import UserError
from semmoe.results import check_row
from semmoe.serving import TokenRows
from semmoe.serving.steplog import StepLog, step_log_path
from simulator.app import load_log, simulate, step_timer
from simulator.engine import simulate_serving
from simulator.layer import PHASES

BASE = (*BATCHES, UNCALIBRATED)


@pytest.fixture(scope="module")
def builder() -> RunBuilder:
    return RunBuilder()


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_every_flow_and_dispatcher_gives_a_valid_row(flow, dispatcher, builder):
    row = check_row(simulate(build(builder, *BASE, f"flow={flow}", f"dispatcher={dispatcher or 'none'}")))
    assert row["backend"] == "simulator" and row["steps"] == 3 and row["tokens"] == 3 * 512
    assert 0 < row["layer_ms_p50"] <= row["layer_ms_p99"] and row["step_ms"] == pytest.approx(6 * row["layer_ms"])
    assert (row["lar_replayed"] is None) == (flow == "tp_replicated")
    assert row["layer_ms"] == pytest.approx(sum(row.get(f"{name}_ms") or 0 for name in PHASES))


def test_the_same_configuration_gives_the_same_row(builder):
    first, second = (simulate(build(builder, *SERVE)) for _ in range(2))
    assert first == second


def test_a_served_run_reports_what_requests_saw(builder):
    row = check_row(simulate(build(builder, *SERVE, "scope=full_model")))
    assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and row["e2e_ms"] > row["ttft_ms"]
    assert row["throughput_rps"] > 0 and row["attention_ms"] > 0 and "roofline" in row["provenance"]
    assert row["goodput_rps"] <= row["throughput_rps"]


def logged(run, folder, **changes):
    """The step log that a measured run would leave; from simulated durations, for want of real ones."""
    loop = run.serving_loop()
    timeline = simulate_serving(loop, step_timer(run))
    durations = timeline.phase_ms("step") * 7
    fields = {
        "config_id": run.config_id,
        "plans": timeline.plans,
        "duration_ms_S": durations,
        "now_ms_S": np.cumsum(durations),
        "tokens": loop.tokens,
    }
    StepLog(**(fields | changes)).save(step_log_path(folder, run.config_id, 0))
    return timeline


def test_replay_reexecutes_a_logged_run(builder, tmp_path):
    timeline = logged(build(builder, *SERVE), tmp_path)
    row = check_row(simulate(build(builder, *SERVE, f"replay={tmp_path}")))
    assert row["steps"] == len(timeline.plans) and row["tokens"] == timeline.meter.tokens
    assert row["lar_replayed"] == pytest.approx(timeline.meter.columns()["lar"])
    assert row["step_ms"] == pytest.approx(timeline.phase_ms("step").mean())
    assert "step plans of" in row["provenance"] and row["steps_file"].endswith("-r0.npz")
    assert row["config_id"] == build(builder, *SERVE).config_id, "a replay joins with the run that it replays"


def test_replay_of_nothing_or_of_another_workload_is_refused(builder, tmp_path):
    with pytest.raises(UserError, match="no such step log"):
        load_log(build(builder, *SERVE, f"replay={tmp_path}"))
    run = build(builder, *SERVE, f"replay={tmp_path}")
    logged(run, tmp_path, tokens=TokenRows(np.zeros(12, dtype=np.int64)))
    with pytest.raises(UserError, match="replay with the overrides"):
        load_log(run)


def test_a_full_model_that_does_not_fit_is_refused(builder):
    with pytest.raises(UserError, match=r"tiny needs 0\.0 GiB of weights a rank on h100x8, which has 0 GiB"):
        simulate(build(builder, *BATCHES, "cluster=h100x8", "cluster.memory_gib=0.001", "scope=full_model"))
    assert simulate(build(builder, *BATCHES, "cluster=h100x8", "cluster.memory_gib=0.001"))["layer_ms"] > 0


def test_presets_predict_and_say_from_what(builder):
    row = check_row(simulate(build(builder, *BATCHES, "cluster=h100x8", "ep_size=8", "dispatcher=a2a_assignment")))
    assert {"interpolated", "fitted"} <= set(row["provenance"].split(", ")), row["provenance"]
    assert len(json.loads(row["lar_per_layer"])) == 6


def test_two_nodes_move_bytes_between_nodes_and_take_longer(builder):
    one = simulate(build(builder, *BATCHES, "cluster=h100x8"))
    two = simulate(build(builder, *BATCHES, "cluster=h100x16"))
    assert one["nic_bytes"] == 0 < two["nic_bytes"]
    assert two["dispatch_ms"] > one["dispatch_ms"]
