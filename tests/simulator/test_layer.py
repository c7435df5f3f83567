"""LayerTimes: what is in a layer and in a step, for every flow and scope; host, attention and dense terms by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_kit import cluster, presets, spec, timer_for, toy_model, traffic_of

from semmoe.dispatch import valid_pairs
from semmoe.serving import DECODE, PREFILL, StepPlan
from simulator.cost.attention import AttentionCost, AttentionLoad
from simulator.cost.dense import DENSE_MFU, GemmLaw
from simulator.cost.host import slowest, waits
from simulator.cost.model import CostModel, handled_rows_LG
from simulator.layer import PHASES, time_layers

ROWS = np.arange(48)
HOMES = ROWS % 4


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_a_layer_is_the_sum_of_its_phases_in_every_flow(flow, dispatcher):
    timer = timer_for(flow, dispatcher)
    timer.run(ROWS, HOMES, None)
    (times,) = timer.timeline.steps
    expected = {"gate", "permute", "experts"} | ({"dispatch", "combine"} if dispatcher else set())
    expected |= set() if flow == "dp" else {"srs", "sag"}
    expected |= {"plan"} if flow == "tp_shuffled" else set()
    assert set(times.phases_L) == expected <= set(PHASES)
    assert all((phase > 0).all() and phase.shape == (3,) for phase in times.phases_L.values())
    np.testing.assert_allclose(times.layer_ms_L, sum(times.phases_L.values()))
    assert times.step_ms == pytest.approx(times.layer_ms_L.sum()) and times.attention_ms == 0


def test_the_full_model_adds_attention_dense_layers_head_and_host():
    inner, whole = timer_for(), timer_for(full_model=True)
    load = AttentionLoad(*(np.full(4, 12.0) for _ in range(4)))
    inner.run(ROWS, HOMES, None)
    whole.run(ROWS, HOMES, load)
    cost, step = whole.cost, whole.timeline.steps[0]
    assert step.step_ms == pytest.approx(
        inner.timeline.steps[0].step_ms + 4 * cost.attention(load) + cost.outside_layers(load)
    )
    assert cost.outside_layers(load) > 0.2, "at least the host's share"
    assert "roofline" in cost.provenance() and "roofline" not in inner.cost.provenance()


def test_shared_experts_stand_in_every_layer():
    load = AttentionLoad(*(np.full(4, 12.0) for _ in range(4)))
    cost = CostModel(toy_model(shared_experts=1, shared_ffn=100), cluster(), spec(), 4)
    times = time_layers(cost, traffic_of("dispatch", np.full((4, 4), 10)), load)
    gemm_us = 12 * 2 * 3 * 500 * 100 / (DENSE_MFU * 100e6)
    memory_us = 3 * 500 * 100 * 2 / (0.85 * 1000e3)
    assert times.phases_L["other"][0] == pytest.approx(max(gemm_us, memory_us) / 1e3)


def test_no_tokens_take_no_time():
    cost = CostModel(toy_model(), cluster(), spec(), 4)
    nothing = replace(traffic_of("dispatch", np.zeros((4, 4), dtype=int)), tokens=0)
    assert time_layers(cost, nothing).step_ms == 0


def test_rows_handled_are_expert_rows_and_both_ways_of_the_dispatch():
    rows = np.array([[5, 1, 0, 0], [2, 5, 0, 0], [0, 0, 5, 0], [0, 0, 0, 5]])
    assert handled_rows_LG(traffic_of("dispatch", rows)).tolist() == [[7 + 1 + 2, 6 + 2 + 1, 5, 5]]


def test_calibrated_host_terms_rule_and_the_most_specific_name_wins():
    measured = {
        "host_us": {"gate": 3.0, "permute": 1.0, "permute.a2a_dedup": 8.0},
        "per_row_ns": {"gate": 500.0},
        "provenance": {"host": "measured here"},
    }
    traffic = traffic_of("dispatch", np.full((4, 4), 10))
    plain = CostModel(toy_model(), cluster(**measured), spec(), 4)
    assert plain.gate(traffic)[0] == pytest.approx((3 + 5 * 0.5) / 1e3)
    assert plain.permute(traffic)[0] == pytest.approx(1 / 1e3)
    dedup = CostModel(toy_model(), cluster(**measured), spec(dispatcher="a2a_dedup"), 4)
    assert dedup.permute(traffic)[0] == pytest.approx(8 / 1e3)
    assert plain.host.marks == {"measured"}
    assert CostModel(toy_model(), cluster(), spec(), 4).host.marks == {"assumed"}, "control: nothing was calibrated"


def test_planning_is_charged_to_tp_shuffled_per_token_where_it_was_measured():
    made = cluster(host_us={"plan.tp_shuffled": 2.0}, per_row_ns={"plan.tp_shuffled": 100.0})
    shuffled = CostModel(toy_model(), made, spec("tp_shuffled", "a2a_dedup"), 4)
    assert shuffled.plan(50) == pytest.approx((2 + 50 * 0.1) / 1e3)
    assert CostModel(toy_model(), made, spec(), 4).plan(50) == 0


def test_planning_is_priced_by_scheduler_and_predictor_where_both_were_measured():
    terms = {"plan.tp_shuffled": 40.0, "plan.semantic": 30.0, "plan.token_table": 5.0, "plan.oracle_tokens": 50.0}
    made = cluster(host_us=terms, per_row_ns={"plan.semantic": 200.0, "plan.token_table": 100.0})

    def plan_us(*names):
        return CostModel(toy_model(), made, spec("tp_shuffled", "a2a_dedup"), 4, planned_by=names).plan(50) * 1e3

    assert plan_us("semantic", "token_table") == pytest.approx(35 + 50 * 0.3)
    assert plan_us("oracle_tokens") == pytest.approx(50), "asks no predictor"
    assert plan_us("semantic", "my.Own") == plan_us("sort_cut", "token_table") == plan_us() == pytest.approx(40)


def entries(*rows: tuple[int, int, int, int, int]) -> StepPlan:
    return StepPlan(0, *np.array(rows, dtype=np.int64).T)


def test_attention_work_of_a_step_by_hand():
    load = AttentionLoad.of(entries((0, 0, PREFILL, 0, 4), (0, 1, DECODE, 9, 1), (2, 2, PREFILL, 10, 2)), 3)
    assert load.tokens_G.tolist() == [5, 0, 2] and load.sequences_G.tolist() == [2, 0, 1]
    assert load.prefill_pairs_G.tolist() == [10, 0, 2 * 10 + 3] and load.decode_kv_G.tolist() == [10, 0, 0]


def test_decode_attention_streams_the_cache_and_prefill_computes_pairs():
    made = cluster(host_us={"attention": 0.0})
    attention = AttentionCost(made, toy_model(), 1)
    zero = np.zeros(1)
    base = attention.time_us(AttentionLoad(np.ones(1), np.ones(1), zero, zero))
    decode = attention.time_us(AttentionLoad(np.ones(1), np.ones(1), zero, np.full(1, 1e6))) - base
    assert decode == pytest.approx(1e6 * 2 * 2 * 32 * 2 / (0.85 * 1000e3))
    prefill = attention.time_us(AttentionLoad(np.ones(1), np.ones(1), np.full(1, 1e9), zero)) - base
    assert prefill == pytest.approx(1e9 * 4 * 4 * 32 / (0.5 * 100e6))


def test_latent_attention_caches_one_row_for_all_heads():
    mla = toy_model(attention="mla", kv_lora_rank=64, rope_head_dim=16, v_head_dim=32)
    made = cluster(host_us={"attention": 0.0}, bf16_tflops=1e6)
    zero = np.zeros(1)
    for tp in (1, 2):
        cost = AttentionCost(made, mla, tp)
        base = cost.time_us(AttentionLoad(np.ones(1), np.ones(1), zero, zero))
        decode = cost.time_us(AttentionLoad(np.ones(1), np.ones(1), zero, np.full(1, 1e6))) - base
        assert decode == pytest.approx(1e6 * (64 + 16) * 2 / (0.85 * 1000e3)), "not split over ranks"


def test_dense_products_are_bound_by_weights_or_by_flops():
    gemm = GemmLaw(cluster())
    weights = 1e6
    assert gemm.time_us(1, weights) == pytest.approx(weights * 2 / (0.85 * 1000e3))
    assert gemm.time_us(10000, weights) == pytest.approx(10000 * 2 * weights / (DENSE_MFU * 100e6))
    assert gemm.time_us(0, weights) == 0


def test_published_dispatcher_table_of_the_h100_is_reproduced():
    """AG + RS and two plain all-to-alls, hidden 2048, top-8, 8 ranks, us a layer both ways (simulators.md 5.2)."""
    made, tokens = presets()["h100x8"], 4096
    assignment = replace(spec(), hidden=2048, top_k=8)
    pairs = np.full((8, 8), tokens)
    plain = traffic_of("dispatch", pairs, row_bytes=4096.0)
    one_way = CostModel(toy_model(), made, replace(assignment, dispatcher="a2a_assignment"), 8)
    sizes_us = float(one_way.network._curve("dispatch", 8).time_us(0.0))  # type: ignore[union-attr]
    a2a = 2e3 * one_way.collectives(plain)["dispatch"][0] - 2 * sizes_us
    assert a2a == pytest.approx(797, rel=0.01)
    gathered = CostModel(toy_model(), made, replace(assignment, flow="tp_scattered"), 8)
    ag = 1e3 * gathered.collectives(traffic_of("all_gather", pairs, row_bytes=4096.0))["sag"][0]
    rs = 1e3 * gathered.collectives(traffic_of("reduce_scatter", pairs, row_bytes=4096.0))["srs"][0]
    assert ag + rs == pytest.approx(778, rel=0.01)


def test_without_a_cuda_graph_a_step_waits_for_the_host_that_issues_its_kernels():
    made = cluster(host_us={"eager_layer": 1000.0, "step": 10.0})
    traffic, zero, some = traffic_of("dispatch", np.full((4, 4), 1)), np.zeros(4), np.full(4, 12.0)
    decode, mixed = AttentionLoad(some, some, zero, some), AttentionLoad(some, some, some, some)
    slow = 4 * 1.0  # four layers of a millisecond
    for graphs, bound in (("all", (False, False)), ("decode", (False, True)), ("none", (True, True))):
        cost = CostModel(toy_model(), made, spec(), 4, cuda_graphs=graphs)
        steps = [time_layers(cost, traffic, load).step_ms for load in (decode, mixed)]
        assert [step == slow for step in steps] == list(bound), graphs
        assert all(0 < step <= slow for step in steps)
    unknown = CostModel(toy_model(), cluster(), spec(), 4, cuda_graphs="none")
    assert unknown.eager_ms(decode) == pytest.approx(4 * 55 / 48, rel=1e-3) and "assumed" in unknown.provenance()


def test_decodes_beside_a_prefill_chunk_may_take_longer_than_alone():
    zero, some = np.zeros(1), np.full(1, 1e6)
    plain, slow = (AttentionCost(cluster(mixed_decode=factor), toy_model(), 1) for factor in (1.0, 2.5))
    one = np.ones(1)
    prefill, decode, mixed = (
        AttentionLoad(one, one, *load, one) for load in ((some, zero), (zero, some), (some, some))
    )
    alone = plain.time_us(decode) - plain.time_us(AttentionLoad(one, one, zero, zero, zero)) + 12.0
    assert slow.time_us(prefill) == plain.time_us(prefill) and slow.time_us(decode) == plain.time_us(decode)
    assert slow.time_us(mixed) - plain.time_us(mixed) == pytest.approx(1.5 * alone)


def test_a_rank_s_own_work_and_its_waiting_add_up_to_the_slowest():
    three = np.array([[5.0, 2.0, 4.0]])
    wait, core = waits(three, 2)
    assert (wait[0], core[0]) == (pytest.approx(7 / 3), pytest.approx(3.0)) and slowest(three, 2)[0] == 9
    rng = np.random.default_rng(0)
    for cores in (0, 1, 2, 3, 8):
        times = rng.random((7, 8))
        wait, core = waits(times, cores)
        np.testing.assert_allclose(times.mean(axis=1) + wait + core, slowest(times, cores))
        assert (wait > -1e-12).all() and (core >= 0).all() and bool(core.any()) == (0 < cores < 8)


def test_the_first_exchange_after_a_barrier_takes_the_start_with_it():
    cost = CostModel(toy_model(), replace(cluster(), host_us={"start": 500.0}), spec(), 4)
    traffic = traffic_of("dispatch", np.full((4, 4), 10))
    plain = CostModel(toy_model(), cluster(), spec(), 4)
    for each, times_started in ((True, traffic.num_layers), (False, 1)):
        late, bare = (time_layers(c, traffic, barrier_each_layer=each) for c in (cost, plain))
        extra = late.phases_L["dispatch"] - bare.phases_L["dispatch"]
        assert extra.sum() == pytest.approx(0.5 * times_started) and extra[0] == pytest.approx(0.5)
        assert late.step_ms - bare.step_ms == pytest.approx(late.layer_ms_L.sum() - bare.layer_ms_L.sum())
    assert set(plain.waits(traffic)) == {"wait"}
