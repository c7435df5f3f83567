"""Two-batch overlap: the schedule of two halves is what one draws by hand, and no entry is lost between them."""

from __future__ import annotations

import numpy as np
import pytest
from composed_runs import SERVE, build
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_kit import timer_for

from semmoe.builder import RunBuilder
from semmoe.serving import StepPlan
from simulator.app import simulate
from simulator.layer import LayerTimes
from simulator.overlap import halves, overlapped, schedule_ms

SERVED = tuple(override for override in SERVE if not override.startswith("cluster."))


def half(before, out, experts, back, layers=1, attention=0.0):
    names = {"gate": before, "dispatch": out, "experts": experts, "combine": back}
    phases = {name: np.full(layers, float(ms)) for name, ms in names.items()}
    layer = np.sum(list(phases.values()), axis=0)
    return LayerTimes(phases, float(layer.sum()) + layers * attention, attention, layer)


def test_the_worked_example():
    assert schedule_ms(np.array([[[1.0], [1.0]], [[2.0], [2.0]], [[3.0], [3.0]], [[1.0], [1.0]]])) == 10


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0, 5), min_size=8, max_size=8), min_size=1, max_size=6))
def test_overlap_lies_between_the_busier_resource_and_one_after_the_other(layers):
    phases = np.ascontiguousarray(np.array(layers).reshape(-1, 4, 2).transpose(1, 2, 0))
    took = schedule_ms(phases)
    compute, exchange = phases[::2].sum(), phases[1::2].sum()
    longest = max(compute, exchange, *phases.sum(axis=(0, 2)))
    assert longest - 1e-9 <= took <= compute + exchange + 1e-9


def test_equal_halves_hide_the_exchange_in_the_limit_of_many_layers():
    made = overlapped(*[half(1, 1, 1, 1, layers=100)] * 2, dense_layers=0, outside_ms=5.0)
    assert made.step_ms == pytest.approx(800 / 2 + 5, rel=0.01)
    assert made.phases_L["dispatch"].tolist() == [2.0] * 100 and made.layer_ms_L.sum() == pytest.approx(400, rel=0.01)


def test_without_an_exchange_nothing_is_gained():
    pair = [half(1, 0, 2, 0, layers=3, attention=0.5)] * 2
    made = overlapped(*pair, dense_layers=2, outside_ms=1.0)
    assert made.step_ms == pytest.approx(sum(p.step_ms for p in pair) + 2 * 2 * 0.5 + 1.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=20))
def test_halves_hold_every_entry_once_and_about_half_of_each_queue(entries):
    rank, count = np.array(sorted(entries)).T
    ids = np.arange(len(rank))
    plan = StepPlan(0, rank, ids, np.zeros_like(ids), np.zeros_like(ids), count)
    made = halves(plan)
    if made is None:
        assert len(ids) == len(set(rank.tolist())) or len(ids) == 1
        return
    assert sorted(np.concatenate([part.request_N for part in made]).tolist()) == ids.tolist()
    for queue in set(rank.tolist()):
        mine = count[rank == queue]
        first = made[0].count_N[made[0].rank_N == queue].sum()
        assert abs(first - mine.sum() / 2) <= mine.max() / 2 + 0.5


def test_a_served_run_counts_the_same_tokens_and_other_times():
    builder = RunBuilder()
    overrides = (*SERVED, "cluster=h100x8", "scope=full_model", "serving.max_running=64", "workload.rate_rps=1e5")
    plain = simulate(build(builder, *overrides))
    made = simulate(build(builder, *overrides, "serving.two_batch_overlap=true"))
    assert made["tokens"] == plain["tokens"] and made["config_id"] != plain["config_id"]
    assert made["step_ms"] != plain["step_ms"]
    assert made["lar_replayed"] == pytest.approx(plain["lar_replayed"], abs=0.01)


def test_a_step_of_one_request_is_not_split():
    timer = timer_for()
    timer.overlap = True
    plan = StepPlan(0, *(np.array([x]) for x in (0, 0, 0, 0, 12)))
    from semmoe.serving import TokenRows

    timer.run_plan(plan, TokenRows(np.array([0])), 4)
    assert len(timer.timeline.steps) == 1 and timer.timeline.meter.steps == 1
