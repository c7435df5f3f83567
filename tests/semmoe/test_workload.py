"""Workload: requests resampled from a trace keep their routes, and batches cover tokens once."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace

from semmoe.errors import UserError
from semmoe.serving import StepPlan, TokenRows
from semmoe.serving.arrivals import arrivals_ms
from semmoe.serving.request_log import RequestLog
from semmoe.serving.workload import Workload, batches, workload_axes


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
        ({"arrivals": "burst"}, "poisson, gamma"),
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


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.0), ("gamma", 0.25)])
def test_renewal_processes_have_the_rate_and_the_burstiness(process, cv):
    gaps = np.diff(arrivals_ms(process, 40_000, 20.0, np.random.default_rng(0), cv=cv))
    assert gaps.mean() == pytest.approx(50.0, rel=0.06) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06, abs=1e-9)


def test_bursts_keep_the_mean_rate_and_alternate_with_silence():
    times = arrivals_ms("bursts", 40_000, 50.0, np.random.default_rng(1), burst_s=1.0, pause_s=4.0)
    gaps = np.diff(times)
    assert (gaps >= 0).all() and len(times) / times[-1] * 1e3 == pytest.approx(50.0, rel=0.12)
    assert np.median(gaps) < 4.5, "250 requests a second while on"
    assert gaps[gaps > 500].sum() / times[-1] == pytest.approx(0.8, abs=0.1), "off four fifths of the time"
    per_second = np.bincount((times / 1e3).astype(int))
    assert per_second.var() / per_second.mean() > 20, "Poisson counts would have 1"


def test_arrivals_are_the_same_for_the_same_seed_and_others_for_another(trace):
    for process in ("gamma", "bursts"):
        made = [Workload.sample(trace, 50, process, 9.0, seed=seed) for seed in (1, 1, 2)]
        times = [[r.arrival_ms for r in work.requests] for work in made]
        assert times[0] == times[1] != times[2]


def test_a_log_of_each_kind_is_read(tmp_path):
    rows = {
        "own.csv": "arrival_s,prompt_len,output_len,hash_ids\n1.5,600,2,7 8\n1.0,5,3,\n",
        "mooncake.jsonl": '{"timestamp": 1500, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}\n'
        '{"timestamp": 1000, "input_length": 5, "output_length": 3, "hash_ids": []}\n',
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,600,2\n2023-11-16 18:15:46.1805900,5,3\n",
        "burst.csv": "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,5,3\n5.5,ChatGPT,600,2\n6,ChatGPT,9,0\n",
    }
    for name, text in rows.items():
        (tmp_path / name).write_text(text)
        log = RequestLog.load(tmp_path / name)
        assert log.arrival_ms_R.tolist() == pytest.approx([0.0, 500.0]), name
        assert (log.prompt_R.tolist(), log.output_R.tolist()) == ([5, 600], [3, 2])
        assert log.prefix_ids == (((), (7, 8)) if name in ("own.csv", "mooncake.jsonl") else ((), ()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("a,b\n1,2\n", "no column for the arrival among a, b"),
        ("arrival_ms,prompt_len\n1,2\n", "no column for the output length"),
        ("arrival_ms,prompt_len,output_len\n1,2,3\nsoon,2,3\n", "line 3: arrival_ms='soon' is no time"),
        ("arrival_ms,prompt_len,output_len\n1,2.5,3\n", "line 2: prompt_len='2.5' is no number"),
        ("arrival_ms,prompt_len,output_len\n1,2,0\n", "no request has any output"),
        ("arrival_ms,prompt_len,output_len\n1,0,2\n", "empty prompt"),
        ("arrival_ms,prompt_len,output_len\nnan,1,2\n", "must be finite"),
        ("arrival_ms,prompt_len,output_len\n1,2\n", "output_len=None is no number"),
        ('{"arrival_ms": 1, "prompt_len": 2, "output_len": 3}\n{"arr', "line 2: not JSON"),
        ('{"arrival_ms": 1, "prompt_len": 2, "output_len": 3, "hash_ids": ["x"]}', "must be whole numbers"),
    ],
)
def test_damaged_logs_are_refused_by_line(tmp_path, text, message):
    (tmp_path / "log").write_text(text)
    with pytest.raises(UserError, match=message):
        RequestLog.load(tmp_path / "log")


def test_a_replayed_log_keeps_its_lengths_and_goes_through_a_short_traced_request_again(trace, tmp_path):
    (tmp_path / "log.csv").write_text("arrival_ms,prompt_len,output_len\n0,50,3\n40,7,1\n60,1,1\n")
    log = RequestLog.load(tmp_path / "log.csv")
    work = Workload.replay(trace, log, seed=4)
    assert [(r.arrival_ms, r.prompt_len, r.output_len) for r in work.requests] == [(0, 50, 3), (40, 7, 1), (60, 1, 1)]
    first = trace.request_offset_R1[work.source_R[0]]
    assert work.requests[0].rows(52).tolist() == [first + i % 20 for i in range(52)]
    plan = StepPlan(0, *(np.array(x) for x in ([0, 1], [0, 1], [0, 0], [18, 0], [5, 2])))
    rows, _ = plan.token_rows(TokenRows.of(work.requests))
    assert rows.tolist() == [*work.requests[0].rows(23)[18:], *work.requests[1].rows(2)]
    faster = Workload.replay(trace, log, 2, rate_rps=100.0)
    assert [r.arrival_ms for r in faster.requests] == [0.0, 10.0]
    with pytest.raises(UserError, match="num_requests=4"):
        Workload.replay(trace, log, 4)


def test_only_declared_prefixes_are_shared(trace, tmp_path):
    assert all(r.prefix_ids == () for r in Workload.sample(trace, 30, rate_rps=1.0).requests)
    grouped = Workload.sample(trace, 30, rate_rps=1.0).sharing(2, 9, 4, seed=0)
    assert {r.prefix_ids for r in grouped.requests} == {(0, 1), (2, 3)}, "two whole blocks of 4 of the 9 tokens"
    (tmp_path / "log.jsonl").write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2, 3]}'
    )
    log = RequestLog.load(tmp_path / "log.jsonl")
    assert Workload.replay(trace, log, block_tokens=4).requests[0].prefix_ids == (1, 2, 3)
    with pytest.raises(UserError, match="prefix_block_tokens=5 must be the tokens that one id stands for"):
        Workload.replay(trace, log, block_tokens=5)


def test_keys_that_change_nothing_make_no_other_configuration(tmp_path):
    from semmoe.config import compose_all

    def axes(*overrides):
        return workload_axes(compose_all(["workload=serve", *overrides])[0]["workload"])

    assert axes("workload.burst_s=9", "workload.arrival_cv=4") == axes()
    assert axes("workload.arrivals=gamma", "workload.arrival_cv=4") != axes("workload.arrivals=gamma")
    (tmp_path / "log.csv").write_text("arrival_ms,prompt_len,output_len\n0,5,3\n")
    (tmp_path / "same.csv").write_text("arrival_ms,prompt_len,output_len\n0,5,3\n")
    logs = [axes(f"workload.log={tmp_path / name}") for name in ("log.csv", "same.csv")]
    assert logs[0] == logs[1] != axes()
