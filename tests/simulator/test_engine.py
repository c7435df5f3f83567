"""Engine: nothing lost, lock step with idle ranks, reproducible, replay of logged plans."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace
from simulator_kit import cluster, timer_for

from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import PREFILL, Request, ServingLimits, ServingLoop
from semmoe.serving.workload import Workload, batches
from semmoe.traffic import count_traffic
from simulator.engine import replay, simulate_batches, simulate_serving
from simulator.traffic_source import TracedTraffic


def serve(flow="dp", requests=None, limits=None, timer=None, **options):
    trace = make_trace()
    timer = timer or timer_for(flow, "a2a_dedup" if flow != "tp_replicated" else None, trace=trace, **options)
    requests = requests or Workload.sample(trace, 30, "poisson", 300.0, seed=1).requests
    loop = ServingLoop(requests, 4 if flow == "dp" else 1, limits or ServingLimits(32, 8, 400), RoundRobin())
    return simulate_serving(loop, timer), loop


@pytest.mark.parametrize("flow", ["dp", "tp_shuffled", "tp_replicated"])
def test_every_token_of_every_request_is_computed_once_and_counted(flow):
    timeline, loop = serve(flow)
    expected = int((loop.prompt_R + loop.output_R - 1).sum())
    assert not loop.preemptions and timeline.meter.tokens == expected
    assert np.isfinite(loop.finish_ms_R).all() and (loop.first_token_ms_R > loop.arrival_ms_R).all()
    assert timeline.end_ms == pytest.approx(np.nanmax(loop.finish_ms_R))
    assert timeline.meter.rows_LG.sum(axis=1).tolist() == [2 * expected] * 3, "k rows a token and layer"
    if flow == "dp":
        assert timeline.meter.homes_LG.sum(axis=1).tolist() == [expected] * 3


def test_a_token_lost_between_plan_and_count_is_seen_in_the_counts():
    timer = timer_for(trace=make_trace())
    of_rows = timer.source.of_rows
    timer.source.of_rows = lambda rows, queue: of_rows(rows[1:], queue[1:])  # type: ignore[method-assign]
    timer._can_run_ahead = False
    timeline, loop = serve(timer=timer)
    assert timeline.meter.tokens == int((loop.prompt_R + loop.output_R - 1).sum()) - len(timeline.steps)


def test_steps_follow_each_other_and_requests_arriving_meanwhile_wait():
    requests = [Request(0, 0.0, 10, 1), Request(1, 0.01, 10, 1, 20), Request(2, 1000.0, 10, 1, 40)]
    timeline, loop = serve(requests=requests)
    first, second, third = (s.step_ms for s in timeline.steps)
    assert first > 0.01
    assert loop.first_token_ms_R == pytest.approx([first, first + second, 1000 + third])


def test_ranks_step_together_and_idle_ones_take_part_without_rows():
    timeline, _ = serve(requests=[Request(0, 0.0, 10, 5)])
    assert timeline.idle_rank_steps == 3 * len(timeline.steps)
    assert timeline.meter.homes_LG[:, 1:].sum() == 0 and timeline.meter.homes_LG[:, 0].tolist() == [14] * 3


def test_the_step_lasts_as_long_as_its_busiest_rank():
    alone, _ = serve(requests=[Request(0, 0.0, 20, 1)])
    beside, _ = serve(requests=[Request(0, 0.0, 20, 1), Request(1, 0.0, 1, 1, 20)])
    assert len(beside.steps) == len(alone.steps) == 1
    assert beside.steps[0].phases_L["gate"] == pytest.approx(alone.steps[0].phases_L["gate"])


@pytest.mark.parametrize("full_model", [False, True])
def test_same_seed_same_timeline(full_model):
    runs = [serve(full_model=full_model)[0] for _ in range(2)]
    for name in ("step", "layer", "dispatch", "experts"):
        assert runs[0].phase_ms(name).tobytes() == runs[1].phase_ms(name).tobytes()
    assert runs[0].meter.columns() == runs[1].meter.columns()


def test_replay_reexecutes_the_logged_plans_and_counts_the_same_traffic():
    timeline, loop = serve()
    again = replay(timeline.plans, loop.tokens, 4, timer_for(trace=make_trace()))
    assert again.phase_ms("step").tolist() == timeline.phase_ms("step").tolist()
    assert (again.meter.rank_pairs_LGG == timeline.meter.rank_pairs_LGG).all()
    assert again.end_ms == pytest.approx(timeline.phase_ms("step").sum())


def test_batches_give_each_layer_a_time_and_count_every_batch():
    trace = make_trace()
    timer = timer_for(trace=trace)
    steps = [(rows, trace.request_T[rows] % 4) for rows in batches(trace, 60, "shuffled", None, 0)]
    timeline = simulate_batches(iter(steps), timer)
    assert timeline.phase_ms("layer").shape == (len(steps) * 3,) and timeline.meter.tokens == 240
    assert timeline.phase_ms("srs").size == 0 and timeline.phase_ms("attention").size == 0
    assert timeline.end_ms == pytest.approx(timeline.phase_ms("layer").sum())


def test_traffic_of_a_step_is_what_the_core_counts_from_the_routes():
    trace = make_trace()
    timer = timer_for(trace=trace)
    rows, homes = np.arange(40, 90), np.arange(50) % 4
    traffic = timer.run(rows, homes, None)
    slots = trace.experts_TLk[rows].astype(np.int64)
    expected = count_traffic(slots, homes, 8, 4, timer.cost.spec)
    assert (traffic.rank_pairs_LGG == expected.rank_pairs_LGG).all()
    assert (traffic.active_experts_LG == expected.active_experts_LG).all()


def test_prefill_is_chunked_across_steps_in_the_simulator_too():
    timeline, _ = serve(requests=[Request(0, 0.0, 20, 1)], limits=ServingLimits(8, 8, 400))
    assert [p.count_N.tolist() for p in timeline.plans] == [[8], [8], [4]]
    assert all((p.phase_N == PREFILL).all() for p in timeline.plans)


class Watched(TracedTraffic):
    """Remembers how many steps were asked for at once."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.ahead: list[int] = []

    def of_stretch(self, stretch, tokens):
        self.ahead.append(stretch.steps)
        return super().of_stretch(stretch, tokens)


@pytest.mark.parametrize("full_model", [False, True])
@pytest.mark.parametrize("rate_rps", [40.0, 300.0])
def test_steps_priced_ahead_are_the_steps_priced_one_by_one(full_model, rate_rps):
    trace = make_trace()
    requests = Workload.sample(trace, 30, "poisson", rate_rps, seed=1).requests
    runs = []
    for ahead in (True, False):
        timer = timer_for(trace=trace, full_model=full_model, cluster=cluster(4, link_gbps=1e-3))
        timer.source = Watched(timer.planner, timer.cost.spec, timer.cost.network.wiring)
        timer._can_run_ahead = ahead
        runs.append((*serve(timer=timer, requests=requests), timer.source.ahead))
    (one, first, calls), (other, second, none) = runs
    assert calls and max(calls) > 3 and not none
    assert [s.step_ms for s in one.steps] == pytest.approx([s.step_ms for s in other.steps], rel=1e-12)
    assert first.finish_ms_R == pytest.approx(second.finish_ms_R, rel=1e-12)
    assert sorted(first.itl_ms()) == pytest.approx(sorted(second.itl_ms()), rel=1e-9)
    assert (first.steps, one.idle_rank_steps, one.meter.tokens) == (
        second.steps,
        other.idle_rank_steps,
        other.meter.tokens,
    )
    for name, value in one.meter.columns().items():
        assert value == pytest.approx(other.meter.columns()[name], rel=1e-12), name
    for left, right in zip(one.plans, other.plans, strict=True):
        assert left.index == right.index and left.start_N.tolist() == right.start_N.tolist()
