"""Recipe: planned figures come from the training part alone, and say what held-out routes will show."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace

from semmoe.dispatch import DispatchSpec
from semmoe.placement.contiguous import Contiguous
from semmoe.predict.token_table import TokenTable
from semmoe.recipe import Recipe, prompt_tokens
from semmoe.replica_router import Local
from semmoe.schedule.none import NoShuffle
from semmoe.schedule.round_robin import RoundRobin
from semmoe.schedule.semantic import Semantic
from semmoe.specs import ClusterSpec, ModelSpec

MODEL = ModelSpec(
    name="toy",
    hidden=16,
    num_layers=4,
    layer_ids=(1, 2, 3),
    num_experts=8,
    top_k=2,
    expert_ffn=8,
    vocab_size=50,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
)
CLUSTER = ClusterSpec(
    name="toy",
    nodes=1,
    ranks_per_node=4,
    topology="switch",
    memory_gib=10,
    memory_gbps=100,
    bf16_tflops=1,
    link_gbps=10,
    alpha_us=10,
)


def recipe(flow: str, token_scheduler=NoShuffle, request_scheduler=RoundRobin) -> Recipe:
    dispatcher = None if flow == "tp_replicated" else "a2a_assignment"
    return Recipe(
        MODEL,
        CLUSTER,
        DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=16, top_k=2),
        4,
        8,
        Contiguous,
        TokenTable,
        request_scheduler,
        token_scheduler,
        Local,
        home_cap=1.1,
    )


def test_planned_lar_uses_folds_of_the_training_part_and_meets_the_held_out_figure():
    trace = make_trace(requests=60, tokens=60)
    train, held = trace.split(0.5, 0)
    plan = recipe("tp_shuffled", Semantic)
    planned = plan.planned(train, 256, folds=4)
    actual = plan.locality(plan.fit(train), held, 256).columns()
    in_sample = plan.locality(plan.fit(train), train, 256).columns()
    assert abs(planned["lar"] - actual["lar"]) < 0.03
    assert abs(planned["fan_out"] - actual["fan_out"]) < 0.06
    assert actual["lar"] > 0.35 and in_sample["lar"] > actual["lar"]


def test_planned_figures_do_not_depend_on_held_out_routes():
    train, _ = make_trace(requests=20).split(0.5, 0)
    assert recipe("dp").planned(train, 64) == recipe("dp").planned(train, 64)


@pytest.mark.parametrize("flow", ["dp", "tp_scattered"])
def test_without_co_scheduling_lar_is_chance(flow):
    trace = make_trace(requests=40, tokens=50)
    train, held = trace.split(0.5, 0)
    columns = recipe(flow).locality(recipe(flow).fit(train), held, 200).columns()
    assert columns["lar"] == pytest.approx(0.25, abs=0.03)


def test_replicated_flow_has_bytes_but_no_lar():
    train, held = make_trace().split(0.5, 0)
    columns = recipe("tp_replicated").locality(recipe("tp_replicated").fit(train), held, 60)
    assert np.isnan(columns.columns()["lar"]) and columns.node_bytes == 2 * (2 * 3) * 120 * 3 * 32


def test_request_scores_count_the_layers_and_only_the_prompt():
    train, held = make_trace(requests=20).split(0.5, 0)
    fitted = recipe("dp").fit(train)
    tokens = prompt_tokens(held, 2)
    assert len(tokens) == held.prompt_len_R[2]
    whole = fitted.request_scores_G(tokens)
    by_layer = sum(
        fitted.predictor.scores(tokens, layer, None, fitted.placement)[0].sum(axis=0, dtype=np.int64)
        for layer in range(3)
    )
    assert np.array_equal(whole, by_layer)
    assert whole.sum() == pytest.approx(3 * len(tokens) * 2 * 65536, rel=1e-3)
