"""Prefill-decode disaggregation: nothing lost or served twice, KV held until it has moved, times of the whole service."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from composed_runs import SERVE, build
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_kit import ConstantTimer, cluster, toy_model

from semmoe.builder import RunBuilder
from semmoe.errors import UserError
from semmoe.results import check_row
from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import DECODE, PREFILL, Request, ServingLimits, ServingLoop
from simulator.app import simulate
from simulator.disaggregated import Disaggregated, simulate_disaggregated
from simulator.kv_link import KvLink

SERVED = tuple(override for override in SERVE if not override.startswith("cluster."))


def served(requests, prefill=1, decode=1, limits=None, step_ms=(2.0, 1.0), link_gbps=1.0):
    limits = limits or ServingLimits(64, 8, 400)
    prompts = [replace(r, output_len=1) for r in requests]
    loops = (
        ServingLoop(prompts, prefill, limits, RoundRobin(), hold_kv=True),
        ServingLoop(requests, decode, limits, RoundRobin()),
    )
    link = KvLink(cluster(prefill + decode, link_gbps=link_gbps), toy_model(), prefill, decode)
    service = Disaggregated(requests, *loops, link)
    timers = [ConstantTimer(ms) for ms in step_ms]
    simulate_disaggregated(service, *timers)  # type: ignore[arg-type]
    return service, timers


def test_one_request_takes_the_time_that_one_counts_by_hand():
    service, (first, second) = served([Request(0, 5.0, 10, 3)])
    kv_ms = (10 + 10 * toy_model().kv_bytes_per_token / 1e3) / 1e3  # alpha 10 us, 1 GB/s
    assert service.link.durations_ms == pytest.approx([kv_ms])
    assert service.prefill.first_token_ms_R[0] == 5 + 2
    assert service.finish_ms_R()[0] == pytest.approx(5 + 2 + kv_ms + 2 * 1)
    assert service.decode.itl_ms().tolist() == pytest.approx([kv_ms + 1, 1.0])
    row = service.served({"ttft_ms": 1e3, "tpot_ms": 1e3})
    assert row["ttft_ms"] == 2 and row["tpot_ms"] == pytest.approx((kv_ms + 2) / 2)
    assert row["e2e_ms"] == pytest.approx(4 + kv_ms) and row["kv_bytes"] == 10 * toy_model().kv_bytes_per_token
    assert len(first.timeline.plans) == 1 and len(second.timeline.plans) == 2


shapes = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=20)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(1, 3), st.integers(1, 3), st.integers(4, 30), st.integers(52, 120))
def test_every_request_is_served_once_across_the_pools(shapes, prefill, decode, batch, kv_tokens):
    requests = [Request(i, a, p, o) for i, (a, p, o) in enumerate(shapes)]
    service, timers = served(requests, prefill, decode, ServingLimits(batch, 6, kv_tokens))
    assert np.isfinite(service.finish_ms_R()).all()
    assert (service.finish_ms_R() >= service.prefill.first_token_ms_R).all()
    outputs = np.array([r.output_len for r in requests])
    made = np.where(outputs > 1, service.decode.produced_R, service.prefill.produced_R)
    assert made.tolist() == outputs.tolist()
    assert not service.prefill.kv.used_G.any() and not service.decode.kv.used_G.any()
    tokens = [sum(plan.num_tokens for plan in timer.timeline.plans) for timer in timers]
    assert sum((plan.phase_N == DECODE).sum() for plan in timers[0].timeline.plans) == 0
    if not service.prefill.preemptions:
        assert tokens[0] == service.prefill.prompt_R.sum()
    if not service.decode.preemptions:
        assert tokens[1] == (outputs - 1).sum()
        assert not any((plan.phase_N == PREFILL).any() for plan in timers[1].timeline.plans)
    sent = service.prefill.prompt_R[outputs > 1].sum()
    assert service.link.bytes_sent == sent * toy_model().kv_bytes_per_token


def test_kv_stays_on_the_prefill_rank_until_it_has_moved():
    """Both prompts fit one after the other only: the second starts when the first one's slow transfer is over."""
    service, _ = served([Request(i, 0.0, 30, 2) for i in range(2)], limits=ServingLimits(64, 8, 40), link_gbps=1e-4)
    assert service.prefill.first_token_ms_R.tolist() == pytest.approx([2.0, 2.0 + service.link.durations_ms[0] + 2.0])
    quick, _ = served([Request(i, 0.0, 30, 2) for i in range(2)], limits=ServingLimits(64, 8, 80), link_gbps=1e-4)
    assert quick.prefill.first_token_ms_R.tolist() == [2.0, 2.0], "the control: room for both"


def test_a_rank_sends_one_transfer_at_a_time():
    service, _ = served([Request(i, 0.0, 10, 2) for i in range(3)], decode=3)
    one, two, three = sorted(service.link.durations_ms)
    assert (two, three) == pytest.approx((2 * one, 3 * one))


def test_transfers_between_nodes_take_the_nic():
    link = KvLink(cluster(4, nodes=2), toy_model(), 2, 2)
    size = 100 * toy_model().kv_bytes_per_token
    assert link.time_ms(100, 0, 1) == pytest.approx((20 + size / 0.5e3) / 1e3)


@pytest.fixture(scope="module")
def builder():
    return RunBuilder()


def test_a_disaggregated_service_gives_a_row_of_both_pools(builder):
    overrides = (*SERVED, "cluster=h100x8", "scope=full_model", "serving.prefill_ranks=4")
    row = check_row(simulate(build(builder, *overrides)))
    whole = check_row(simulate(build(builder, *overrides[:-1])))
    assert row["ep_size"] == 8 and row["tokens"] == whole["tokens"] and row["config_id"] != whole["config_id"]
    assert row["kv_transfer_ms"] > 0 and row["kv_bytes"] > 0 and "kv_bytes" not in whole
    assert 0 < row["lar_replayed"] < 1 and row["throughput_rps"] > 0 and row["tpot_ms"] > 0
    assert row["lar_replayed"] == pytest.approx(2 * whole["lar_replayed"], rel=0.3), (
        "half the ranks hold twice the experts"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("serving.prefill_ranks=8",), "leaves none to decode"),
        (("serving.prefill_ranks=4", "replacement.every_steps=2"), "does not go with replacement.every_steps"),
        (("cluster=h100x16", "serving.prefill_ranks=4"), "divides a node of 8; a multiple of 8"),
        (("serving.prefill_ranks=2", "flow=tp_scattered"), "needs flow=dp"),
    ],
)
def test_impossible_pools_are_refused(builder, overrides, message):
    cluster_of = () if any(word.startswith("cluster") for word in overrides) else ("cluster=h100x8",)
    with pytest.raises(UserError, match=message):
        build(builder, *SERVED, *cluster_of, *overrides)


@pytest.mark.parametrize("key", ["prefill_ranks=2", "two_batch_overlap=true"])
def test_what_only_requests_know_is_refused_for_batches(builder, key):
    with pytest.raises(UserError, match=f"serving.{key.split('=')[0]}=.* needs requests"):
        build(builder, "workload=batches", "cluster=h100x8", f"serving.{key}")
