"""Attention from measured tables: a rank's load finds the measured row, other head counts fall back to the roofline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from simulator_kit import CONF, cluster, presets, toy_model

from semmoe.errors import UserError
from semmoe.plugins import instantiate
from semmoe.serving import DECODE, PREFILL, StepPlan
from simulator.cost.attention import AttentionCost, AttentionLoad

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "perfdata"


def model(name):
    return instantiate(yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text()), "model")


def plan(entries):
    """StepPlan of (phase, start, count) on rank 0."""
    phase, start, count = np.array(entries, dtype=np.int64).T
    return StepPlan(0, np.zeros_like(phase), np.arange(len(phase)), phase, start, count)


def core_us(cost, entries):
    """Time of one block without its projections."""
    load = AttentionLoad.of(plan(entries), 1)
    return float(cost.time_us(load)[0] - cost.gemm.time_us(load.tokens_G, cost.model.attention_params)[0])


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_a_rank_with_a_measured_load_takes_the_measured_time(name):
    cost = AttentionCost(presets()["h100x8"], model(name), attention_tp=1)
    tables = {t["phase"]: t for t in presets()["h100x8"].attention if t["kind"] == cost.model.attention}
    checked = 0
    for phase, entry in (("prefill", lambda n: (PREFILL, 0, n)), ("decode", lambda n: (DECODE, n - 1, 1))):
        for batch, length, us in zip(*(tables[phase][key] for key in ("batch", "length", "us")), strict=True):
            if batch in (1, 8, 64) and length in (512, 2048):
                assert core_us(cost, [entry(length)] * batch) == pytest.approx(us, rel=1e-6)
                checked += 1
    assert checked >= 10 and cost.marks == {"roofline", "interpolated"}


def test_prefill_and_decode_of_a_step_add_up_and_a_later_chunk_takes_longer():
    cost = AttentionCost(presets()["h100x8"], model("qwen3-30b-a3b"), attention_tp=1)
    first, decode = [(PREFILL, 0, 1024)], [(DECODE, 4000, 1)] * 64
    assert core_us(cost, first + decode) == pytest.approx(core_us(cost, first) + core_us(cost, decode), rel=1e-6)
    assert core_us(cost, [(PREFILL, 4096, 1024)]) > 2 * core_us(cost, first)


def test_unequal_prompts_count_as_equal_ones_with_as_many_pairs():
    cost = AttentionCost(presets()["h100x8"], model("qwen3-30b-a3b"), attention_tp=1)
    unequal, equal = core_us(cost, [(PREFILL, 0, 1000), (PREFILL, 0, 3000)]), core_us(cost, [(PREFILL, 0, 2236)] * 2)
    assert unequal == pytest.approx(equal, rel=0.01)


def test_other_heads_than_the_measured_ones_are_priced_by_roofline():
    split = AttentionCost(presets()["h100x8"], model("qwen3-30b-a3b"), attention_tp=8)
    assert split.marks == {"roofline"} and AttentionCost(cluster(), toy_model(), 1).marks == {"roofline"}


def test_a_table_without_its_keys_is_refused():
    broken = cluster(attention=({"kind": "gqa", "phase": "decode", "heads": 4},))
    with pytest.raises(UserError, match="lacks kv_heads, head_dim, batch, length, us"):
        AttentionCost(broken, toy_model(), 1)


def test_presets_hold_what_the_public_file_says():
    if not DATA.is_dir():
        pytest.skip("the public measurements are not beside this checkout")
    import pandas as pd

    table = pd.read_csv(DATA / "attention_gqa_32q4kv_hd128_bf16.csv")
    row = table[
        (table.system == "h100_sxm") & (table.batch_size == 8) & (table.isl == 1024) & (table.phase == "context")
    ]
    tables = [t for t in presets()["h100x8"].attention if t["kind"] == "gqa" and t["phase"] == "prefill"]
    at = list(zip(tables[0]["batch"], tables[0]["length"], strict=True)).index((8, 1024))
    assert tables[0]["us"][at] == pytest.approx(row.latency_us.median(), abs=0.05)
