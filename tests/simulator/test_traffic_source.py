"""Expected traffic: exact where routes have no spread, close to traced traffic over many tokens, for every flow."""

from __future__ import annotations

import numpy as np
import pytest
from composed_runs import BATCHES, SERVE, build

import semmoe.traffic.wiring
from semmoe.builder import RunBuilder
from semmoe.dispatch import valid_pairs
from semmoe.errors import UserError
from semmoe.results import check_row
from simulator.app import simulate, step_timer
from simulator.cost.loads import loads_of
from simulator.expected_error import table

SERVED = tuple(override for override in SERVE if not override.startswith("cluster."))


@pytest.fixture(scope="module")
def builder():
    return RunBuilder()


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_expected_traffic_has_the_same_sums_and_close_parts_in_every_flow(flow, dispatcher, builder):
    names = (*BATCHES, "cluster=h100x8", f"flow={flow}", f"dispatcher={dispatcher or 'none'}")
    timers = [step_timer(build(builder, *names, f"routing={routing}")) for routing in ("traced", "expected")]
    rows_T, queue_T = next(iter(build(builder, *names).batch_steps()))
    traced, expected = (timer.source.of_rows(rows_T, queue_T) for timer in timers)
    assert expected.tokens == traced.tokens and [c.op for c in expected.collectives] == [
        c.op for c in traced.collectives
    ]
    assert expected.homes_LG.sum() == pytest.approx(traced.homes_LG.sum())
    assert expected.expert_rows_LG.sum(axis=1) == pytest.approx(traced.expert_rows_LG.sum(axis=1))
    assert expected.assignment_pairs_LGG.sum() == pytest.approx(traced.assignment_pairs_LGG.sum())
    assert expected.rank_pairs_LGG.sum() == pytest.approx(traced.rank_pairs_LGG.sum(), rel=0.1)
    assert expected.active_experts_LG.sum() == pytest.approx(traced.active_experts_LG.sum(), rel=0.15)
    assert expected.payload_bytes() == pytest.approx(traced.payload_bytes(), rel=0.1)
    assert (expected.active_experts_LG <= expected.expert_rows_LG + 1e-9).all()


def test_two_nodes_expect_copies_to_nodes_too(builder):
    names = (*BATCHES, "cluster=h100x16")
    rows = [simulate(build(builder, *names, f"routing={routing}")) for routing in ("traced", "expected")]
    assert rows[1]["nic_bytes"] == pytest.approx(rows[0]["nic_bytes"], rel=0.1)
    assert rows[1]["dispatch_ms"] == pytest.approx(rows[0]["dispatch_ms"], rel=0.1)


@pytest.mark.parametrize(
    "option", ["routing=expected", "cost.fidelity=flow", "flow=tp_shuffled token_scheduler=rehome"]
)
def test_what_reads_pairs_gets_them_over_more_ranks(option, builder, monkeypatch):
    names = ("workload.max_batches=1", "workload.batch_tokens=32", *option.split())
    run = build(builder, *BATCHES[:1], "cluster=h100x16", *names)
    usual = simulate(run)
    monkeypatch.setattr(semmoe.traffic.wiring, "PAIRS_UP_TO", 8)
    pairs = ("assignment_pairs", "rank_pairs")  # shown where the meter keeps them
    assert {**simulate(run), **{name: usual[name] for name in pairs}} == pytest.approx(usual)
    monkeypatch.setattr(semmoe.traffic.wiring, "NEEDED_PAIRS_UP_TO", 8)
    with pytest.raises(UserError, match="ranks"):
        simulate(run)


def test_a_served_run_is_close_to_the_traced_one_and_says_how_it_was_made(builder):
    names = (*SERVED, "cluster=h100x8", "scope=full_model")
    traced, expected = (check_row(simulate(build(builder, *names, f"routing={r}"))) for r in ("traced", "expected"))
    assert "expected_routing" in expected["provenance"] and "expected_routing" not in traced["provenance"]
    assert expected["config_id"] != traced["config_id"] and expected["tokens"] == traced["tokens"]
    for name in ("ttft_ms", "tpot_ms", "step_ms"):
        assert expected[name] == pytest.approx(traced[name], rel=0.1)
    lines = table(traced, expected)
    assert any(line.startswith("| tpot_ms |") and line.endswith("% |") for line in lines)


def test_one_token_more_brings_its_share_of_rows(builder):
    source = step_timer(build(builder, *BATCHES, "cluster=h100x8", "routing=expected")).source
    one, two = (source.of_rows(np.arange(n), np.zeros(n, dtype=np.int64)) for n in (1, 2))
    assert two.expert_rows_LG == pytest.approx(2 * one.expert_rows_LG) and one.expert_rows_LG.max() < 4
    assert (two.active_experts_LG < 2 * one.active_experts_LG).all(), "two tokens share some experts"


@pytest.mark.parametrize(("flow", "dispatcher"), [pair for pair in valid_pairs() if pair[1]])
def test_rows_of_few_expected_tokens_add_up_on_every_link(flow, dispatcher, builder):
    names = (*BATCHES, "cluster=h100x16", f"flow={flow}", f"dispatcher={dispatcher}", "routing=expected")
    timer = step_timer(build(builder, *names))
    wiring = timer.cost.network.wiring
    few, many = (
        timer.source.of_rows(np.zeros(n, np.int64), np.zeros(n, np.int64) if flow == "dp" else None) for n in (1, 1000)
    )
    for one, thousand in zip(few.collectives, many.collectives, strict=True):
        ports, more = one.ports(wiring), thousand.ports(wiring)
        for name in ("node_rows_L", "nic_rows_L"):
            assert getattr(more, name) == pytest.approx(1000 * getattr(ports, name)), (one.op, name)
        assert loads_of(thousand, wiring).port_L == pytest.approx(1000 * loads_of(one, wiring).port_L), one.op


def test_expected_locality_is_that_of_unseen_requests(builder):
    learnt = ("train_fraction=0.1", "placement=semantic", "request_scheduler=semantic", "planned_folds=0")
    rows = [simulate(build(builder, *SERVED, *learnt, f"routing={routing}")) for routing in ("traced", "expected")]
    assert rows[1]["lar_replayed"] == pytest.approx(rows[0]["lar_replayed"], rel=0.03)
