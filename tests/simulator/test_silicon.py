"""cost.silicon: the measured database's layout read from a tiny folder; the real package where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
from simulator_kit import cluster, toy_model

from semmoe.errors import UserError
from simulator import silicon
from simulator.cost.attention import AttentionCost, AttentionLoad
from simulator.cost.curves import CurveSet
from simulator.cost.dense import GemmLaw
from simulator.cost.experts import ExpertTimes
from simulator.silicon import silicon_cluster

needs_pyarrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed (semmoe[silicon])")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


@pytest.fixture
def tiny(tmp_path):
    """A system with NCCL over 4 ranks, fused MoE and GQA tables of the toy model, DeepEP; older versions beside them."""

    def write(where, **columns):
        path = tmp_path / "chip" / where
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(columns).to_parquet(path)

    sizes = [2.0**e for e in range(8, 28)]
    nccl = {"nccl_dtype": "half", "num_gpus": 4, "message_size": sizes * 2}
    nccl["op_name"] = ["alltoall"] * 20 + ["all_reduce"] * 20
    write("comm/nccl/2.9.1/nccl_perf.parquet", **nccl, latency=[1.0] * 40)
    write("comm/nccl/2.29.2/nccl_perf.parquet", **nccl, latency=[0.01 + size * 2 / 1e9 for size in sizes * 2])
    moe = {"moe_dtype": "bfloat16", "num_tokens": TOKENS, "hidden_size": 500, "inter_size": 100, "topk": 2}
    moe |= {"num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced"}
    write("moe/sglang/0.5.14/moe_perf.parquet", **moe, latency=[0.02 + 1e-5 * t for t in TOKENS])
    heads = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "attn_dtype": "bfloat16", "window_size": 0}
    heads |= {"kv_cache_dtype": "bfloat16", "batch_size": 1, "isl": [16, 64, 256]}
    write("attention/vllm/0.24.0/context_attention_perf.parquet", **heads, step=[0, 0, 32], latency=[0.02, 0.05, 9.0])
    gemm = [(m, n, k) for m in TOKENS for n in (64, 512, 1024) for k in (512, 2048)]
    m, n, k = (list(column) for column in zip(*gemm, strict=True))
    gemm_ms = [1.0 if b < 512 else (5 + max(b * c * 2 / 8e5, 2 * a * b * c / 7e7)) / 1e3 for a, b, c in gemm]
    write("gemm/vllm/0.24.0/gemm_perf.parquet", gemm_dtype="bfloat16", m=m, n=n, k=k, latency=gemm_ms)
    deepep = {"node_num": 1, "hidden_size": 500, "num_topk": 2, "num_experts": 8, "num_token": [1, 128]}
    write(
        "comm/sglang/0.5.12/wideep_deepep_ll_perf.parquet",
        **deepep,
        dispatch_avg_t_us=[9.0, 20.0],
        combine_avg_t_us=[10.0, 30.0],
    )
    return str(tmp_path / "chip")


@needs_pyarrow
def test_tables_of_the_models_shape_replace_the_clusters_figures(tiny):
    made = silicon_cluster(cluster(), toy_model(), tiny)
    alltoall = CurveSet(made.curves).pick(["alltoall"], 4)
    assert alltoall and alltoall.time_us(2.0 * 2**20) == pytest.approx(10 + 2 * 2**20 / 1e6), "elements, newest version"
    experts = ExpertTimes(made, toy_model())
    rows = 2 * np.array(TOKENS[2:])
    assert experts.time_us(rows, np.full(len(rows), 8)) == pytest.approx(20 + 1e-2 * np.array(TOKENS[2:]), rel=0.2)
    assert experts.provenance == "fitted"
    dense = GemmLaw(made)
    assert dense.time_us([1, 1e6], 2.0**20, products=2) == pytest.approx(
        [10 + 2**21 / 8e5, 10 + 1e6 * 2**21 / 7e7], rel=0.02
    )
    attention = AttentionCost(made, toy_model(), 1)
    assert attention.marks == {"fitted", "interpolated"}
    zero, prompt = np.zeros(1), np.array([64 * 65 / 2])
    inside = attention.time_us(AttentionLoad(np.array([64.0]), np.ones(1), prompt, zero))
    projections = attention.time_us(AttentionLoad(np.array([64.0]), np.ones(1), zero, zero)) - 12.0  # the floor
    assert inside - projections == pytest.approx(50.0, rel=0.01), "the row with earlier KV does not count"
    assert made.deepep["low_latency"]["combine_us"] == [10.0, 30.0] and made.deepep["low_latency"]["ranks"] == 8
    assert {"curves", "experts", "gemm", "attention", "deepep"} <= set(made.provenance)


@needs_pyarrow
def test_an_unmeasured_shape_is_refused_with_what_is_held_unless_allowed(tiny):
    other = toy_model(expert_ffn=96)
    with pytest.raises(UserError, match=r"no experts for toy .*held .*\(500, 100, 2, 8\).*allow_roofline"):
        silicon_cluster(cluster(), other, tiny)
    kept = silicon_cluster(cluster(), other, tiny, allow_missing=True)
    assert kept.max_mfu == cluster().max_mfu and kept.curves


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(silicon, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'semmoe\[silicon\]'"):
        silicon_cluster(cluster(), toy_model(), "h200_sxm")


@needs_pyarrow
@pytest.mark.skipif(find_spec(silicon.PACKAGE) is None, reason="aiconfigurator-core is not installed (semmoe[silicon])")
def test_the_real_database_holds_the_published_h200_points():
    folder = silicon.system_folder("h200_sxm")
    curve = CurveSet(silicon.collective_curves(folder)).pick(["alltoall"], 8)
    assert curve and curve.time_us(512 << 20) == pytest.approx(1510, rel=0.02)  # simulators.md 5.1
    with pytest.raises(UserError, match="no such system"):
        silicon.system_folder("h2000")
