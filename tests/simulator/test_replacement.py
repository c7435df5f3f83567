"""Re-placement at run time: it follows a drift, its bytes and stalls are in the step, and where nothing changes it is free."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.session import measure_all
from simulator.app import step_timer
from simulator.engine import simulate_batches
from simulator.replacement import ReplacingTimer, observed

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
def replaced(*overrides: str) -> ReplacingTimer:
    (config,) = compose_all([*COMMON, *overrides])
    run = RunBuilder().build(config)
    timer = step_timer(run)
    assert isinstance(timer, ReplacingTimer)
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
