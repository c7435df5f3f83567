"""Trace of a simulated run: bars of a rank never overlap and fill the step, waiting shows, pair traffic is the meter's."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from conftest import make_trace
from simulator_kit import timer_for

from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import ServingLimits, ServingLoop
from semmoe.serving.workload import Workload
from simulator import timeline_trace
from simulator.engine import simulate_serving
from simulator.timeline_trace import communication_share_L, trace_events, traffic_document


@pytest.fixture(scope="module")
def served():
    trace = make_trace()
    timer = timer_for(trace=trace, full_model=True)
    timer.timeline.keep_traffic = 20
    loop = ServingLoop(
        Workload.sample(trace, 30, "poisson", 300.0, seed=1).requests, 4, ServingLimits(32, 8, 400), RoundRobin()
    )
    return simulate_serving(loop, timer), timer.cost


def bars(events, rank):
    return sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] == rank)


def test_only_the_first_steps_are_traced_at_the_times_they_ran(served):
    timeline, cost = served
    events = trace_events(timeline, cost)
    steps = {e["args"]["step"] for e in events if e["ph"] == "X"}
    assert steps == set(range(20)) and len(timeline.steps) > 20
    for index in (0, 7, 19):
        mine = [e for e in events if e["ph"] == "X" and e["args"]["step"] == index]
        assert min(e["ts"] for e in mine) == pytest.approx(1e3 * timeline.start_ms[index], abs=0.01)
        end_ms = timeline.start_ms[index] + timeline.steps[index].step_ms
        assert max(e["ts"] + e["dur"] for e in mine) == pytest.approx(1e3 * end_ms, abs=0.01)


def test_bars_of_a_rank_do_not_overlap(served):
    timeline, cost = served
    events = trace_events(timeline, cost)
    for rank in range(4):
        spans = bars(events, rank)
        assert all(after[0] >= before[1] - 1e-2 for before, after in pairwise(spans))
        assert {"attention", "dispatch", "combine"} <= {name for _, _, name in spans}


def test_the_slowest_rank_fills_its_phase_and_others_wait(served):
    timeline, cost = served
    own, times = cost.by_rank(timeline.traffic[3]), timeline.steps[3]
    for name in ("gate", "permute", "experts"):
        np.testing.assert_allclose(own[name].max(axis=1), times.phases_L[name])
    assert (own["experts"].min(axis=1) < own["experts"].max(axis=1)).any()


def test_traffic_document_holds_the_meters_pairs_and_a_share_for_every_layer(served):
    timeline, cost = served
    document = json.loads(json.dumps(traffic_document(timeline, cost)))
    assert document["rank_pairs"] == timeline.meter.rank_pairs_LGG.sum(axis=0).tolist()
    assert np.array(document["assignment_pairs_per_layer"]).sum() == 2 * 3 * timeline.meter.tokens
    share = communication_share_L(timeline)
    exchange = sum(timeline.phase_ms(name).sum() for name in ("dispatch", "combine"))
    assert len(share) == 3 and (share > 0).all() and (share < 1).all()
    assert exchange / timeline.phase_ms("layer").sum() == pytest.approx(share.mean(), rel=0.05)


def test_the_command_writes_both_files(tmp_path, capsys):
    options = ["cluster=h100x8", "workload.max_batches=3", "steps=2", f"out={tmp_path}"]
    assert timeline_trace.main(options) == 0 and "2 of 3 steps" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"} and (tmp_path / "traffic.json").is_file()
