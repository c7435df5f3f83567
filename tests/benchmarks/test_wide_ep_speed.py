"""Speed of one wide-EP decode step: deepseek-v3, 58 MoE layers, one slot a rank, 32 tokens a rank, nodes of 8.

    make bench      or      python -m pytest tests/benchmarks/test_wide_ep_speed.py --benchmark-enable -s

288 ranks hold 256 experts and 32 redundant ones, 1,024 ranks four copies of each. A step routes every token in every layer
(replica router included), counts traffic by port and prices it. CPU time of the process, one thread.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.plugins import instantiate
from semmoe.replica_router import Local
from semmoe.specs import ClusterSpec
from semmoe.trace import RoutingTrace
from semmoe.traffic.locality import LocalityMeter
from simulator.cost.model import CostModel
from simulator.step_timer import StepTimer

CONF = Path(__file__).resolve().parents[2] / "conf"
TOKENS_A_RANK, EXPERTS, TOP_K = 32, 256, 8
BARS_MS = {64: None, 128: None, 288: 50.0, 576: None, 1024: 200.0}  # ranks: the bar on a step


def step_timer(ranks: int) -> StepTimer:
    model = instantiate(yaml.safe_load((CONF / "model" / "deepseek-v3.yaml").read_text()), "model")
    raw = yaml.safe_load((CONF / "cluster" / "h100x16.yaml").read_text())
    cluster = replace(ClusterSpec.from_dict(raw), name=f"h100x{ranks}", nodes=ranks // 8)
    rng = np.random.default_rng(0)
    tokens, layers = ranks * TOKENS_A_RANK, model.num_moe_layers
    start = rng.integers(0, EXPERTS, (tokens, layers, 1), dtype=np.int16)
    stride = 2 * rng.integers(0, EXPERTS // 2, (tokens, layers, 1), dtype=np.int16) + 1
    trace = RoutingTrace(
        model=model.name,
        num_experts=EXPERTS,
        vocab_size=model.vocab_size,
        experts_TLk=(start + stride * np.arange(TOP_K, dtype=np.int16)) % np.int16(EXPERTS),
        token_id_T=rng.integers(0, model.vocab_size, tokens),
        request_offset_R1=np.arange(tokens + 1),
        prompt_len_R=np.zeros(tokens, dtype=np.int64),
        domain_R=np.array(["synthetic"] * tokens),
        layer_ids_L=np.array(model.layer_ids),
    )
    slots = max(ranks, EXPERTS)
    placement = Placement(
        np.tile(np.arange(slots, dtype=np.int32) % EXPERTS, (layers, 1)), ranks, model.layer_ids, EXPERTS
    )
    spec = DispatchSpec(flow="dp", dispatcher="a2a_dedup", hidden=model.hidden, top_k=TOP_K, dispatch_dtype="fp8")
    planner = StepPlanner(trace, placement, spec, replica_router=Local())
    cost = CostModel(model, cluster, spec, ranks, slots)
    return StepTimer(planner, cost, LocalityMeter(layers, ranks, cost.network.wiring))


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("ranks", BARS_MS)
def test_wide_decode_step(benchmark, ranks):
    if benchmark.disabled and ranks != 288:
        pytest.skip("timed only with --benchmark-enable; one size keeps the path alive")
    timer = step_timer(ranks)
    rows_T = np.arange(timer.planner.trace.num_tokens)
    traffic = benchmark.pedantic(timer.run, (rows_T, rows_T % ranks, None), rounds=5, warmup_rounds=1)
    assert traffic.expert_rows_LG.sum() == len(rows_T) * 58 * TOP_K
    if benchmark.stats is not None:
        step_ms, peak_gib = 1e3 * benchmark.stats.stats.min, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        benchmark.extra_info |= {"step_ms": step_ms, "peak_gib": peak_gib}
        bar = BARS_MS[ranks]
        verdict = "" if bar is None else f", bar {bar:.0f} ms " + ("kept" if step_ms < bar else "MISSED")
        print(
            f"\n{ranks} ranks: {step_ms:.0f} ms a step (median {1e3 * benchmark.stats.stats.median:.0f}){verdict}; "
            f"{peak_gib:.2f} GiB at most; simulated layer {timer.timeline.steps[-1].layer_ms_L.mean():.3f} ms"
        )
        assert peak_gib < 4
