"""Workload: requests resampled from a trace keep their routes, and batches cover tokens once."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace

from semmoe.errors import UserError
from semmoe.workload import Workload, batches


def test_every_traced_request_is_used_once_before_any_is_used_again(trace):
    work = Workload.sample(trace, 30, rate_rps=100.0, seed=3)
    counts = np.bincount(work.source_R, minlength=12)
    assert set(counts.tolist()) <= {2, 3} and len(work.requests) == 30
    assert [r.id for r in work.requests] == list(range(30))


def test_requests_point_at_their_own_rows_also_when_cut(trace):
    for max_prompt, max_output in ((None, None), (4, 3)):
        work = Workload.sample(trace, 12, rate_rps=5.0, max_prompt=max_prompt, max_output=max_output)
        for request, source in zip(work.requests, work.source_R, strict=True):
            end_of_prompt = trace.request_offset_R1[source] + trace.prompt_len_R[source]
            assert request.token_start + request.prompt_len == end_of_prompt
            last = request.token_start + request.prompt_len + request.output_len - 1
            assert last <= trace.request_offset_R1[source + 1]
            assert request.prompt_len == min(10, max_prompt or 10) and request.output_len == min(11, max_output or 11)


def test_poisson_arrivals_have_the_rate_and_are_seeded(trace):
    work = Workload.sample(trace, 4000, rate_rps=20.0, seed=1)
    arrivals = np.array([r.arrival_ms for r in work.requests])
    assert np.diff(arrivals).mean() == pytest.approx(50.0, rel=0.05)
    assert np.diff(arrivals).std() == pytest.approx(50.0, rel=0.1)
    again = Workload.sample(trace, 4000, rate_rps=20.0, seed=1)
    assert [r.arrival_ms for r in again.requests] == arrivals.tolist()


def test_arrivals_of_the_trace_are_replayed_in_time_order():
    times = np.random.default_rng(0).permutation(12) * 10.0
    work = Workload.sample(make_trace(arrival_ms_R=times), 12, arrivals="trace")
    assert [r.arrival_ms for r in work.requests] == sorted(times)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 0}, "num_requests=0"),
        ({"rate_rps": 0.0}, "rate_rps"),
        ({"arrivals": "burst"}, "poisson, trace"),
        ({"arrivals": "trace"}, "holds no arrival_ms"),
    ],
)
def test_bad_workloads_are_refused(trace, changes, message):
    with pytest.raises(UserError, match=message):
        Workload.sample(trace, **({"num_requests": 3} | changes))


@pytest.mark.parametrize("composition", ["shuffled", "sequential"])
def test_batches_cover_tokens_at_most_once(trace, composition):
    parts = list(batches(trace, 50, composition, None, 0))
    rows = np.concatenate(parts)
    assert [len(p) for p in parts] == [50] * 4 and len(np.unique(rows)) == 200
    if composition == "sequential":
        assert np.array_equal(rows, np.arange(200))


def test_a_trace_shorter_than_a_batch_is_one_batch(trace):
    (only,) = batches(trace, 10_000, "shuffled", None, 0)
    assert len(only) == 240
    with pytest.raises(UserError, match="batch_tokens"):
        next(batches(trace, 0, "shuffled", None, 0))
    with pytest.raises(UserError, match="composition"):
        next(batches(trace, 5, "sorted", None, 0))
