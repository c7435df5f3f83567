"""ServingLoop: nothing lost, nothing served twice, limits kept, under chunking, preemption and idle ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_kit import drive

from semmoe.errors import UserError
from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import DECODE, PREFILL, Request, ServingLimits, ServingLoop, StepPlan, TokenRows


def requests_of(shapes: list[tuple[float, int, int]]) -> list[Request]:
    return [Request(i, a, p, o) for i, (a, p, o) in enumerate(shapes)]


shapes = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(1, 30), st.integers(1, 6), st.integers(52, 120))
def test_every_request_is_served_once_within_the_limits(shapes, queues, batch_tokens, running, kv_tokens):
    requests = requests_of(shapes)
    limits = ServingLimits(batch_tokens, running, kv_tokens)
    loop = ServingLoop(requests, queues, limits, RoundRobin())
    plans = drive(loop)
    assert np.isfinite(loop.finish_ms_R).all() and (loop.finish_ms_R >= loop.first_token_ms_R).all()
    assert (loop.first_token_ms_R > loop.arrival_ms_R).all()
    assert (loop.produced_R == loop.output_R).all() and (loop.kv.used_G == 0).all()
    for plan in plans:
        per_queue = np.bincount(plan.rank_N, weights=plan.count_N, minlength=queues)
        assert per_queue.max() <= batch_tokens and plan.count_N.min() > 0
        assert np.bincount(plan.rank_N).max() <= running
        assert len(set(plan.request_N.tolist())) == len(plan.request_N)
        assert (plan.rank_N == loop.rank_R[plan.request_N]).all()
        assert (plan.count_N[plan.phase_N == DECODE] == 1).all()
    if not loop.preemptions:
        computed = np.zeros(len(requests), dtype=int)
        for plan in plans:
            assert (plan.start_N == computed[plan.request_N]).all(), "tokens are computed in order, none twice"
            computed[plan.request_N] += plan.count_N
        assert (computed == loop.prompt_R + loop.output_R - 1).all()


def test_a_single_request_takes_the_steps_that_one_counts_by_hand():
    loop = ServingLoop([Request(0, 5.0, 10, 3)], 1, ServingLimits(4, 8, 100))
    plans = drive(loop, step_ms=2.0)
    assert [(p.phase_N[0], p.start_N[0], p.count_N[0]) for p in plans] == [
        (PREFILL, 0, 4),
        (PREFILL, 4, 4),
        (PREFILL, 8, 2),
        (DECODE, 10, 1),
        (DECODE, 11, 1),
    ]
    assert loop.first_token_ms_R[0] == 5 + 3 * 2 and loop.finish_ms_R[0] == 5 + 5 * 2


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(1, 9), st.integers(52, 120), st.booleans())
def test_a_stretch_is_the_steps_that_follow_one_by_one(shapes, most, kv_tokens, hold_kv):
    """The same plans, counters and times, whether the loop goes step by step or several steps at once."""
    requests = [Request(i, 0.0, prompt, output) for i, (_, prompt, output) in enumerate(shapes)]
    one, many = (
        ServingLoop(requests, 2, ServingLimits(16, 6, kv_tokens), RoundRobin(), hold_kv=hold_kv) for _ in range(2)
    )
    for request in requests:
        one.submit(request, 0.0)
        many.submit(request, 0.0)
    now_ms = 0.0
    while isinstance(many.next_step(now_ms), StepPlan):
        stretch = many.stretch(most)
        ends_ms = [now_ms + 1.0 + s for s in range(min(stretch.steps, most))]
        for plan, end_ms in zip(stretch.plans(stretch.steps), ends_ms, strict=True):
            step = one.next_step(end_ms - 1.0)
            assert isinstance(step, StepPlan) and step.index == plan.index
            for name in ("rank_N", "request_N", "phase_N", "start_N", "count_N"):
                assert getattr(step, name).tolist() == getattr(plan, name).tolist()
            one.complete(step, 1.0)
        many.complete_stretch(stretch, ends_ms)
        now_ms = ends_ms[-1]
        for name in ("computed_R", "produced_R", "first_token_ms_R", "last_token_ms_R", "finish_ms_R"):
            np.testing.assert_array_equal(getattr(one, name), getattr(many, name))
        assert (one.steps, one.unfinished, one.preemptions) == (many.steps, many.unfinished, many.preemptions)
        assert one.kv.used_G.tolist() == many.kv.used_G.tolist() and sorted(one.itl_ms()) == sorted(many.itl_ms())


def test_preemption_recomputes_and_loses_no_output():
    loop = ServingLoop(requests_of([(0, 10, 30), (0, 10, 30)]), 1, ServingLimits(64, 8, 45))
    drive(loop)
    assert loop.preemptions > 0
    assert (loop.produced_R == 30).all()


def test_decode_comes_before_prefill_and_prefill_fills_the_rest():
    loop = ServingLoop(requests_of([(0, 4, 5), (3, 100, 2)]), 1, ServingLimits(8, 8, 1000))
    plans = drive(loop)
    mixed = [p for p in plans if set(p.phase_N.tolist()) == {PREFILL, DECODE}]
    assert mixed and all(p.num_tokens == 8 for p in mixed)


def test_idle_ranks_hold_no_entry_but_the_others_go_on():
    loop = ServingLoop(requests_of([(0, 8, 4)]), 4, ServingLimits(), RoundRobin())
    assert all(set(plan.rank_N.tolist()) == {0} for plan in drive(loop))


def test_nothing_to_run_names_the_next_arrival_and_then_nothing():
    loop = ServingLoop(requests_of([(7.5, 2, 1)]), 1, ServingLimits())
    assert loop.next_step(0.0) == 7.5
    loop.submit(loop.requests[0], 7.5)
    step = loop.next_step(7.5)
    assert isinstance(step, StepPlan)
    loop.complete(step, 1.0)
    assert loop.done and loop.next_step(8.5) is None


def test_end_of_sequence_seen_by_the_executor_ends_the_request():
    loop = ServingLoop(requests_of([(0, 4, 100)]), 1, ServingLimits())
    loop.submit(loop.requests[0], 0.0)
    for finished in ([], [], [0]):
        step = loop.next_step(0.0)
        assert isinstance(step, StepPlan)
        loop.complete(step, 1.0, finished)
    assert loop.done and loop.produced_R[0] == 3


def test_token_rows_point_into_the_trace():
    plan = StepPlan(0, *(np.array(x) for x in ([0, 1], [1, 0], [0, 1], [2, 7], [3, 1])))
    rows, queue = plan.token_rows(TokenRows(np.array([100, 200])))
    assert rows.tolist() == [202, 203, 204, 107] and queue.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "bad",
    [{"prompt_len": 0}, {"output_len": 0}, {"arrival_ms": -1.0}, {"arrival_ms": float("nan")}, {"arrival_ms": 1e20}],
)
def test_impossible_requests_are_refused(bad):
    with pytest.raises(UserError):
        Request(**({"id": 0, "arrival_ms": 0.0, "prompt_len": 1, "output_len": 1} | bad))


def test_impossible_configurations_and_calls_are_refused():
    with pytest.raises(UserError, match="needs 30 KV tokens"):
        ServingLoop([Request(0, 0.0, 20, 10)], 1, ServingLimits(kv_tokens=29))
    with pytest.raises(UserError, match="max_batch_tokens=0"):
        ServingLimits(max_batch_tokens=0)
    with pytest.raises(UserError, match="scheduler"):
        ServingLoop([], 2, ServingLimits())
    loop = ServingLoop([Request(0, 0.0, 2, 1)], 1, ServingLimits())
    loop.submit(loop.requests[0], 0.0)
    with pytest.raises(UserError, match="submitted twice"):
        loop.submit(loop.requests[0], 0.0)
    step = loop.next_step(0.0)
    with pytest.raises(RuntimeError, match="in flight"):
        loop.next_step(0.0)
    with pytest.raises(ValueError, match="duration_ms"):
        loop.complete(step, float("nan"))


def test_a_scheduler_that_names_no_such_rank_is_named():
    class Wild:
        def assign(self, request, score_G, head_counts, ranks):
            return 9

    loop = ServingLoop([Request(0, 0.0, 2, 1)], 2, ServingLimits(), Wild())
    loop.submit(loop.requests[0], 0.0)
    with pytest.raises(UserError, match=r"Wild returned rank 9 for request 0; 0\.\.1"):
        loop.next_step(0.0)


def test_other_scores_move_the_requests_that_wait_and_no_other():
    class Follow:
        def assign(self, request, score_G, head_counts, ranks):
            return int(np.argmax(score_G))

    requests, towards = requests_of([(0.0, 4, 3)] * 4 + [(5.0, 4, 3)]), [np.array([1, 0]), np.array([0, 1])]
    loop = ServingLoop(requests, 2, ServingLimits(max_running=1), Follow(), lambda request: towards[0])
    for request in requests[:4]:
        loop.submit(request, 0.0)
    step = loop.next_step(0.0)  # request 0 runs on rank 0, where the others wait
    loop.reschedule(lambda request: towards[1], lambda request: None)
    loop.complete(step, 1.0)
    assert loop.next_step(1.0).request_N.tolist() == [0, 1] and loop.rank_R.tolist() == [0, 1, 1, 1, -1]
    loop.complete(loop._in_flight, 1.0)
    loop.submit(requests[4], 5.0)
    while not loop.done:
        loop.complete(loop.next_step(loop._now_ms), 1.0)
    assert loop.rank_R[4] == 1 and (np.diff(loop.finish_ms_R[1:]) > 0).all(), "first come, first served"
    assert (loop.produced_R == loop.output_R).all() and not loop.kv.used_G.any()
