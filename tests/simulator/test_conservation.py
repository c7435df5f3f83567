"""What goes in comes out: every token of every request is computed, counted and sent, whatever the service does to it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from composed_runs import build
from conftest import make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_kit import timer_for

from semmoe.builder import RunBuilder
from semmoe.dispatch import valid_pairs
from semmoe.results import check_row
from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import Request, ServingLimits, ServingLoop
from simulator.app import serve, simulate
from simulator.engine import simulate_serving

shapes = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from(["dp", "tp_shuffled"]), st.integers(1, 12), st.integers(28, 60))
def test_a_preempted_request_starts_again_and_every_token_computed_is_counted(shapes, flow, batch, kv_tokens):
    requests = [Request(i, a, p, o, 20 * (i % 12), 20) for i, (a, p, o) in enumerate(shapes)]
    loop = ServingLoop(requests, 4 if flow == "dp" else 1, ServingLimits(batch, 5, kv_tokens), RoundRobin())
    timeline = simulate_serving(loop, timer_for(flow, trace=make_trace()))
    parts: dict[int, list[tuple[int, int]]] = {request.id: [] for request in requests}
    for plan in timeline.plans:
        for r, start, count in zip(plan.request_N, plan.start_N, plan.count_N, strict=True):
            parts[int(r)].append((int(start), int(count)))
    restarts = 0
    for request in requests:
        end = 0
        for start, count in parts[request.id]:
            assert start in (0, end), "tokens in order; only a request that lost its KV computes any twice"
            restarts += start == 0 and end > 0
            end = start + count
        assert end == request.prompt_len + request.output_len - 1
    computed = sum(plan.num_tokens for plan in timeline.plans)
    assert restarts <= loop.preemptions and bool(restarts) == (
        computed > int((loop.prompt_R + loop.output_R - 1).sum())
    )
    meter = timeline.meter
    assert meter.tokens == computed and meter.rows_LG.sum(axis=1).tolist() == [2 * computed] * 3
    assert meter.assignment_pairs_LGG.sum(axis=(1, 2)).tolist() == [2 * computed] * 3
    assert loop.produced_R.tolist() == loop.output_R.tolist() and not loop.kv.used_G.any()


@pytest.fixture(scope="module")
def builder():
    return RunBuilder()


SERVED = ("planned_folds=0", "workload=serve", "workload.num_requests=80", "workload.rate_rps=9000")
SERVED += ("workload.max_prompt=60", "workload.max_output=40")
TIGHT = ("serving.kv_tokens=130",)


@pytest.mark.parametrize(
    ("overrides", "preempts"),
    [
        ((), False),
        (TIGHT, True),
        (("routing=expected",), False),
        (("serving.two_batch_overlap=true",), False),
        (("serving.prefill_ranks=8",), False),
        (("serving.prefill_ranks=8", *TIGHT), True),
        (("ep_size=12", "serving.prefill_ranks=8"), False),
        (("workload.prefix_groups=3", "workload.prefix_tokens=48", "serving.prefix_block_tokens=16"), False),
    ],
)
def test_rows_of_a_service_over_two_nodes_add_up(builder, overrides, preempts):
    run = build(builder, "cluster=h100x16", *SERVED, *overrides)
    row = check_row(simulate(run))
    _, timers = serve(run)
    computed = sum(plan.num_tokens for timer in timers for plan in timer.timeline.plans)
    requests = run.workload.requests
    needed = sum(r.prompt_len + r.output_len - 1 for r in requests)
    assert row["tokens"] == computed and bool(row["preemptions"]) == preempts
    if row["prefix_hit_rate"]:
        hits = row["prefix_hit_rate"] * sum(r.prompt_len for r in requests)
        assert computed == pytest.approx(needed - hits)
    else:
        assert computed > needed if preempts else computed == needed
    bytes_by_op = sum(row.get(f"{op}_bytes") or 0 for op in ("dispatch", "combine", "srs", "sag", "expert_ids"))
    assert row["node_bytes"] + row["nic_bytes"] == pytest.approx(bytes_by_op) and bool(row["nic_bytes"]) == (
        run.pools is None
    )
    assert row["bytes_per_token_replayed"] == pytest.approx(bytes_by_op / computed)
    pairs_GG = np.array(json.loads(row["assignment_pairs"]))
    assert pairs_GG.shape == (row["ep_size"],) * 2
    assert pairs_GG.sum() == pytest.approx(computed * run.model.num_moe_layers * run.model.top_k)
    if "kv_bytes" in row:
        sent = sum(r.prompt_len for r in requests if r.output_len > 1)
        assert row["kv_bytes"] == sent * run.model.kv_bytes_per_token


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_bytes_of_the_tiers_are_the_bytes_of_the_operations_in_every_flow(builder, flow, dispatcher):
    row = simulate(
        build(
            builder,
            "cluster=h100x16",
            "planned_folds=0",
            "workload.max_batches=2",
            f"flow={flow}",
            f"dispatcher={dispatcher or 'none'}",
        )
    )
    tiers = {"node_bytes", "nic_bytes", "spine_bytes", "metadata_bytes", "kv_moved_bytes"}
    operations = sum(value for name, value in row.items() if name.endswith("_bytes") and name not in tiers)
    assert row["node_bytes"] + row["nic_bytes"] == pytest.approx(operations) and operations > 0
