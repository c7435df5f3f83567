"""Re-placement at run time: it follows a drift, its bytes and stalls are in the step, and where nothing changes it is free."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.run import Run
from semmoe.session import measure_all
from simulator.app import serve, simulate, step_timer
from simulator.engine import simulate_batches
from simulator.replacement import observed

COMMON = (
    "model=tiny",
    "cluster=h100x8",
    "ep_size=4",
    "trace=synthetic",
    "trace.requests=48",
    "trace.prompt_len=48",
    "trace.output_len=0",
    "trace.groups=4",
    "trace.topics=4",
    "trace.vocab_size=64",
    "trace.drift=1.0",
    "trace.load_skew=2.0",
    "split=time",
    "train_fraction=0.25",
    "flow=tp_shuffled",
    "token_scheduler=semantic",
    "workload.batch_tokens=192",
    "workload.composition=sequential",
    "planned_folds=0",
    "time_limit_s=1",
    "replacement.every_steps=3",
)


@cache
def replaced(*overrides: str):
    (config,) = compose_all([*COMMON, *overrides])
    run = RunBuilder().build(config)
    timer = step_timer(run)
    simulate_batches(run.batch_steps(), timer)
    return timer


def test_a_drift_is_followed_and_every_figure_is_in_its_place():
    timer = replaced("placement=load_balanced")
    columns = timer.columns()
    layers_ms = sum(times.layer_ms_L.sum() for times in timer.timeline.steps)
    assert timer.timeline.phase_ms("step").sum() == pytest.approx(layers_ms + columns["replacement_stall_ms"])
    assert columns["replacements"] == 2 and columns["migration_node_bytes"] > 0 and columns["migration_nic_bytes"] == 0
    assert columns["migration_node_bytes"] % timer.recipe.model.expert_bytes == 0
    gain_ms, stall_ms = columns["replacement_gain_ms"], columns["replacement_stall_ms"]
    assert gain_ms > 0 and columns["break_even_steps"] == pytest.approx(stall_ms / 2 / gain_ms)
    assert columns["replacement_net_ms"] == pytest.approx(gain_ms * len(timer.gains_ms) - stall_ms)


def test_hidden_weights_do_not_stall():
    timer = replaced("placement=load_balanced", "replacement.overlap=1.0")
    assert (
        timer.columns()["replacement_stall_ms"] == 0
        and timer.node_bytes == replaced("placement=load_balanced").node_bytes
    )


def test_a_placement_that_does_not_look_at_routes_moves_nothing_and_gains_what_the_new_predictor_gains():
    timer = replaced("placement=contiguous", "token_scheduler=none")
    columns = timer.columns()
    assert columns["replacements"] == 2 and columns["migration_node_bytes"] == columns["replacement_stall_ms"] == 0
    assert np.abs(timer.gains_ms).max() == 0 and columns["break_even_steps"] is None


def test_what_was_observed_is_a_trace_of_just_those_rows():
    trace = replaced("placement=contiguous", "token_scheduler=none").trace
    rows = np.array([50, 3, 4, 4, 49])
    part = observed(trace, rows)
    assert part.num_tokens == 4 and part.num_requests == 2
    assert (part.experts_TLk == trace.experts_TLk[[3, 4, 49, 50]]).all()


def test_a_measurement_refuses_to_re_place():
    with pytest.raises(UserError, match="simulate only"):
        measure_all(["replacement.every_steps=2"], False, None)


DP = ("flow=dp", "dispatcher=a2a_dedup", "placement=load_balanced", "request_scheduler=semantic")
SERVE = (*DP, "workload=serve", "workload.num_requests=24", "workload.rate_rps=4000", "serving.max_running=2")
SERVE += ("trace.output_len=8", "split=random", "train_fraction=0.4", "replacement.every_steps=8")


def built(*overrides: str) -> Run:
    (config,) = compose_all([*(word for word in COMMON if not word.startswith("workload.")), *overrides])
    return RunBuilder().build(config)


def test_requests_that_have_not_started_get_homes_under_the_new_placement_and_the_others_stay():
    timer, without = replaced(*DP), replaced(*DP, "replacement.every_steps=0")
    heads, first = timer.heads, timer.of.heads
    assert timer.columns()["replacements"] == 2
    begun = np.unique(timer.trace.request_T[: 3 * 192])  # before the first re-placement, batches in order of requests
    rest = np.setdiff1d(np.arange(timer.trace.num_requests), begun)
    assert (heads.rank_R[begun] == first.rank_R[begun]).all() and (heads.rank_R[rest] != first.rank_R[rest]).any()
    assert set(heads.rank_R.tolist()) <= set(range(4))
    for counted in (timer.timeline.meter, without.timeline.meter):
        assert counted.tokens == timer.trace.num_tokens // 192 * 192 or counted.tokens == timer.trace.num_tokens
        assert (counted.rows_LG.sum(axis=1) == counted.tokens * timer.trace.top_k).all()
        assert (counted.homes_LG.sum(axis=1) == counted.tokens).all()
    saved_ms = without.timeline.phase_ms("step").sum() - timer.timeline.phase_ms("step").sum()
    assert timer.columns()["replacement_net_ms"] == pytest.approx(saved_ms), (
        "two runs apart say what the paired one says"
    )


@pytest.mark.parametrize("flow", [DP[:1], ("flow=tp_shuffled",)], ids=["dp", "tp_shuffled"])
def test_a_served_run_loses_no_request_token_or_byte_and_is_compared_with_the_run_without(flow):
    run, without = built(*SERVE, *flow), simulate(built(*SERVE, *flow, "replacement.every_steps=0"))
    columns, (timer,) = serve(run)
    with_ = columns | timer.columns() | {"tokens": timer.timeline.meter.tokens}
    assert timer.loop.done and not timer.loop.kv.used_G.any() and with_["replacements"] > 1
    assert (timer.loop.produced_R == timer.loop.output_R).all() and set(timer.loop.rank_R) <= set(range(4))
    assert with_["tokens"] == without["tokens"] == (timer.loop.prompt_R + timer.loop.output_R - 1).sum()
    assert (timer.timeline.meter.rows_LG.sum(axis=1) == with_["tokens"] * run.heldout.top_k).all()
    assert with_["migration_node_bytes"] % run.model.expert_bytes == 0
    assert with_["replacement_e2e_gain_ms"] == pytest.approx(without["e2e_ms"] - with_["e2e_ms"])
    assert with_["replacement_tpot_gain_ms"] == pytest.approx(without["tpot_ms"] - with_["tpot_ms"])


@pytest.mark.parametrize("workload", [SERVE, DP], ids=["served", "batches"])
def test_a_placement_equal_to_the_first_changes_nothing(workload):
    names = (*workload, "placement=contiguous")
    names += () if "workload=serve" in workload else ("workload.batch_tokens=192", "workload.composition=sequential")
    with_, without = (simulate(built(*names, f"replacement.every_steps={every}")) for every in (3, 0))
    assert with_["replacements"] > 1 and not with_["replacement_net_ms"] and not with_["migration_node_bytes"]
    same = {name: value for name, value in without.items() if name not in ("config_id", "axes", "settings_digest")}
    assert {name: with_[name] for name in same} == pytest.approx(same)
