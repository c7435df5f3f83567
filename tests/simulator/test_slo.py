"""Throughput under SLO: bisection finds a known limit, says when there is none, and the simulator's own is between."""

from __future__ import annotations

import re

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.cli import main as cli
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.row_files import read_rows
from semmoe.serving import Request, ServingLimits, ServingLoop, StepPlan
from simulator.slo import Objective, lightest_load, server, throughput_under_slo


def queue(limit_rps):
    """A machine whose latency explodes at limit_rps, as 1 / (1 - load) does."""

    def serve(rate):
        load = rate / limit_rps
        wait = 10 / (1 - load) if load < 1 else 1e9
        return {"ttft_ms_p90": wait, "tpot_ms_p90": 1.0, "throughput_rps": min(rate, limit_rps)}

    return serve


@pytest.mark.parametrize("limit_rps", [0.3, 7.0, 1234.0])
def test_bisection_finds_where_latency_crosses_the_bound_from_either_side(limit_rps):
    found = throughput_under_slo(queue(limit_rps), Objective(50.0, 5.0), tolerance=0.01)
    assert found.bounded and found.rate_rps == pytest.approx(0.8 * limit_rps, rel=0.011)
    assert found.throughput_rps == found.rate_rps and len(found.trials) < 40
    broken = [rate for rate, met in found.trials if not met]
    assert min(broken) > found.rate_rps


def test_an_objective_that_nothing_meets_gives_no_throughput():
    found = throughput_under_slo(queue(7.0), Objective(5.0, 5.0))
    assert (found.rate_rps, found.throughput_rps) == (0.0, 0.0)


def test_a_workload_too_short_to_break_the_objective_is_said_to_be_unbounded():
    found = throughput_under_slo(
        lambda rate: queue(1e30)(rate) | {"throughput_rps": min(rate, 99.0)}, Objective(50.0, 5.0)
    )
    assert not found.bounded and (found.rate_rps, found.throughput_rps) == (512.0, 99.0)


def test_either_bound_breaks_the_objective():
    objective = Objective(50.0, 5.0)
    assert objective.met({"ttft_ms_p90": 50.0}) and objective.met({"ttft_ms_p90": 50.0, "tpot_ms_p90": 5.0})
    assert not objective.met({"ttft_ms_p90": 51.0}) and not objective.met({"ttft_ms_p90": 1, "tpot_ms_p90": 5.1})
    with pytest.raises(UserError, match="tolerance"):
        throughput_under_slo(queue(1), objective, tolerance=0)
    whole = Objective(e2e_ms=300.0)
    assert whole.met({"ttft_ms_p90": 1e9, "e2e_ms_p90": 300.0}) and not whole.met({"e2e_ms_p90": 301.0})
    mean = Objective(50.0, e2e_ms=300.0, statistic="mean")  # the tail does not count
    assert mean.met({"ttft_ms": 49, "ttft_ms_p90": 99, "e2e_ms": 299}) and not mean.met({"ttft_ms": 1, "e2e_ms": 301})


def test_the_papers_objective_is_five_times_the_mean_of_the_lightest_load():
    overrides = ["workload=serve", "workload.num_requests=5", "cluster=h100x8", "planned_folds=0", "scope=full_model"]
    (config,) = compose_all(overrides)
    run = RunBuilder().build(config)
    alone, objective = server(run)(1e-3), lightest_load(run)
    assert objective.ttft_ms == 5 * alone["ttft_ms"] and objective.e2e_ms == 5 * alone["e2e_ms"]
    assert objective.met(alone) and objective.statistic == "mean"


def test_the_simulated_machine_meets_the_papers_objective_up_to_some_rate_and_not_beyond():
    overrides = ["workload=serve", "workload.num_requests=40", "cluster=h100x8", "planned_folds=0"]
    overrides += ["serving.max_running=2", "serving.max_batch_tokens=64", "scope=full_model"]
    (config,) = compose_all(overrides)
    run = RunBuilder().build(config)
    objective = lightest_load(run)
    found = throughput_under_slo(server(run), objective, start_rps=200.0, tolerance=0.2)
    assert found.bounded and found.rate_rps > 0
    assert objective.met(server(run)(found.rate_rps)) and not objective.met(server(run)(1.25 * found.rate_rps))


def test_the_command_keeps_a_row_for_every_rate_with_the_bounds_it_was_judged_by(tmp_path, capsys):
    words = ["workload=serve", "workload.num_requests=10", "cluster=h100x8", "tolerance=0.5", "slo=absolute"]
    words += [f"results_dir={tmp_path}", "name=r", "slo.ttft_ms=50", "slo.e2e_ms=900"]
    assert cli(["slo", *words]) == 0
    rates = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines() if line.startswith("   ")]
    rows = read_rows([tmp_path / "r"])
    assert sorted(rows.rate_rps) == pytest.approx(sorted(rates), abs=0.01) and rows.config_id.is_unique
    assert set(rows.slo_ttft_ms) == {50.0} and set(rows.slo_e2e_ms) == {900.0} and rows.throughput_rps.notna().all()
    # the row is the one that `simulate` makes at that rate
    assert cli(["simulate", *words[:3], *words[5:], "workload.rate_rps=1.0", "name=s", "planned_folds=0"]) == 0
    (twin,) = read_rows([tmp_path / "s"]).to_dict("records")
    ours = rows[rows.config_id == twin["config_id"]].iloc[0]
    assert ours.ttft_ms == twin["ttft_ms"] and ours.throughput_rps == twin["throughput_rps"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tolerance=x"], "tolerance=x must be a number"),
        (["tolerance=0"], "between 0 and 1"),
        (["slo.e2e_ms=-1"], "slo.e2e_ms=-1"),
        (["experiment=demo"], "configurations .* one is right"),
    ],
)
def test_what_the_command_cannot_search_is_refused(capsys, words, message):
    assert cli(["slo", "workload=serve", "workload.num_requests=2", "cluster=h100x8", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_inter_token_latencies_are_the_steps_between_the_tokens_of_a_request():
    loop = ServingLoop([Request(0, 0.0, 4, 3), Request(1, 0.0, 4, 2)], 1, ServingLimits(6, 4, 100))
    for request in loop.requests:
        loop.submit(request, 0.0)
    for duration in (10.0, 7.0, 5.0, 3.0, 2.0):
        if loop.done:
            break
        step = loop.next_step(0.0)
        assert isinstance(step, StepPlan)
        loop.complete(step, duration)
    # step 1: request 0's prompt and half of 1's; then 0's second and 1's first token; then 0's third and 1's second
    assert loop.done and sorted(loop.itl_ms().tolist()) == [5.0, 5.0, 7.0]
    assert loop.last_token_ms_R.tolist() == loop.finish_ms_R.tolist()
    assert np.isclose(loop.itl_ms().sum(), (loop.finish_ms_R - loop.first_token_ms_R).sum())
