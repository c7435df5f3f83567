"""The content of one conf/cluster file, from the rows of public tables. Sources by number, quoted in its provenance:

[1] ai-dynamo/aiconfigurator@095f58a5 (Apache-2.0): NCCL, fused MoE, DeepEP and attention tables
[2] hardware_presets.csv: specifications with the source of each
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..cost.experts import ExpertLaw, fit_expert_law
from .deepep import deepep
from .machines import Preset

AIC = "ai-dynamo/aiconfigurator@095f58a5"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
QWEN3 = (2048, 768)  # hidden and FFN width of the measured experts
ATTENTION_FILES = {
    "gqa": ("attention_gqa_32q4kv_hd128_bf16.csv", 32, 4),
    "mla": ("attention_mla_16heads_bf16.csv", 16, 16),
}
ATTENTION = {  # source of each kind's table
    "a100_sxm": {"gqa": "sglang/0.5.10", "mla": "vllm/0.14.0"},
    "h100_sxm": {"gqa": "vllm/0.24.0", "mla": "sglang/0.5.14"},
    "h200_sxm": {"gqa": "vllm/0.24.0", "mla": "sglang/0.5.14"},
    "b200_sxm": {"gqa": "vllm/0.24.0", "mla": "sglang/0.5.14"},
}
# H200, vLLM Triton, BF16, EP1, balanced: (tokens, us), as transcribed in the project's notes from [1]
H200_MOE = ((1, 40.0), (16, 305.0), (128, 316.0), (1024, 406.0), (4096, 691.0), (16384, 2463.0))


def build(preset: Preset, data: Path) -> dict[str, Any]:
    """The content of one conf/cluster file."""
    hardware: Any = pd.read_csv(data / "hardware_presets.csv").set_index("preset").loc[preset.hardware]
    raw: dict[str, Any] = {
        "name": preset.name,
        "nodes": preset.nodes,
        "ranks_per_node": preset.ranks_per_node,
        "topology": {"switch": "switch", "full mesh": "mesh", "PCIe tree": "pcie"}[hardware.topology],
        "memory_gib": float(hardware.mem_GiB),
        "memory_gbps": float(hardware.mem_GBps),
        "bf16_tflops": float(hardware.bf16_dense_TFLOPS),
    }
    if not np.isnan(hardware.fp8_dense_TFLOPS):
        raw["fp8_tflops"] = float(hardware.fp8_dense_TFLOPS)
    if preset.fabric != "flat":
        raw["fabric"] = preset.fabric
    effective = pd.to_numeric(hardware.a2a_eff_GBps_n8, errors="coerce")
    if not np.isnan(effective):
        raw["link_gbps"] = float(effective)
    raw["alpha_us"] = float(str(hardware.a2a_alpha_us_n8).split()[0])
    said = {
        "hardware": f"[2] {hardware.sources}",
        "link": f"{hardware.link}, {hardware.link_GBps_per_dir_per_gpu} GB/s a direction raw; link_gbps and alpha_us are "
        f"the alpha-beta fit of all-to-all over 8: {hardware.comm_numbers_are} (confidence {hardware.confidence})",
    }
    if preset.nodes > 1:
        raw |= {"nic_gbps": preset.nic_gbps, "nic_alpha_us": 20.0}
        said["nic"] = (
            "46-49 GB/s of an NDR port usable (NVIDIA/nccl-tests#267, #290); alpha assumed, DeepEP's two-node "
            f"floor is 22 us a direction ({AIC}, deepep_low_latency, EP16)"
        )
    _experts(preset, data, raw, said)
    for name, value, why in preset.assumed:
        raw[name] = value
        said[name] = why
    raw["host_us"] = {"attention": _attention_floor(preset, data), "step": 200.0}
    said["host_us"] = "attention: smallest measured kernel time where a table exists, else 12; step: assumed"
    tables = _attention(preset, data)
    if tables:
        raw["attention"] = tables
        said["attention"] = (
            f"measured [1] {AIC}: {', '.join(sorted(set(ATTENTION[_chip(preset)].values())))}; other "
            "shapes and the projections by roofline"
        )
    held, told = deepep(preset.hardware, preset.deepep, data)
    if held:
        raw["deepep"] = held
        said["deepep"] = f"[1] {AIC}, DeepEP; {told}"
    if preset.nccl:
        raw["curves"] = curves(pd.read_csv(data / "nccl_intranode.csv"), *preset.nccl)
        said["curves"] = f"measured [1] {AIC}, nccl-tests, {preset.nccl[0]}, NCCL {preset.nccl[1]}, half precision"
    return raw | {"provenance": said}


def curves(table: pd.DataFrame, system: str, version: str) -> list[dict[str, Any]]:
    """Latency by size of every collective over 2, 4 and (where measured) 8 ranks, from one clean NCCL version."""
    picked = table[(table.system == system) & (table.nccl_version.astype(str) == version) & (table.dtype == "half")]
    made = []
    measured = sorted(set(picked.num_gpus))
    if not measured:
        raise ValueError(f"no NCCL rows for {system}, NCCL {version}")
    for op in OPS:
        for ranks in measured:
            rows = picked[(picked.op == op) & (picked.num_gpus == ranks)].sort_values("bytes")
            if rows.empty:
                raise ValueError(f"no {op} over {ranks} ranks for {system}, NCCL {version}")
            made.append(
                {"op": op, "ranks": ranks, "bytes": rows["bytes"].tolist(), "latency_us": rows.latency_us.tolist()}
            )
    return made


def _experts(preset: Preset, data: Path, raw: dict[str, Any], said: dict[str, str]) -> None:
    if preset.moe is None:
        said["experts"] = "assumed: no MoE table"
        return
    points = moe_points(pd.read_csv(data / "moe_fused_qwen3_30b_a3b.csv"), *preset.moe)
    spec = pd.read_csv(data / "hardware_presets.csv").set_index("preset")
    measured_on = {"a100_sxm": "a100_sxm_80g", "l40s": "l40s_pcie", "gb200": "gb200_nvl72"}
    chip: Any = spec.loc[measured_on.get(preset.moe[0], preset.moe[0])]
    law = fit_expert_law(points, *QWEN3, memory_gbps=float(chip.mem_GBps), tflops=float(chip.bf16_dense_TFLOPS))
    raw |= {
        "memory_efficiency": round(float(law.memory_efficiency), 4),
        "max_mfu": round(float(law.max_mfu), 4),
        "mfu_half_rows": round(float(law.half_rows), 1),
        "expert_floor_us": round(float(law.floor_us), 1),
    }
    median, worst = residuals(law, points)
    said["experts"] = (
        f"fitted [1] {AIC}, fused MoE of Qwen3-30B-A3B, EP1, balanced, {preset.moe[0]} {preset.moe[1]} {preset.moe[2]}, "
        f"{len(points)} points: median error {median:.1%}, largest {worst:.1%}"
        + (" (same compute as this machine)" if preset.hardware == "h800_sxm" else "")
    )


def moe_points(table: pd.DataFrame, system: str, backend: str, kernel: str) -> list[tuple[float, float, float]]:
    """(rows, active experts, us) of one rank that holds all 128 experts, balanced routing, BF16."""
    if system == "h200_sxm":
        pairs: list[tuple[float, float]] = list(H200_MOE)
    else:
        rows = table[
            (table.system == system)
            & (table.backend == backend)
            & (table.kernel_source == kernel)
            & (table.moe_dtype == "bfloat16")
            & (table.moe_ep_size == 1)
            & (table.distribution == "balanced")
        ].sort_values("num_tokens")
        pairs = list(zip(rows.num_tokens, rows.latency_us, strict=True))
    return [(8.0 * tokens, float(min(8 * tokens, 128)), float(us)) for tokens, us in pairs]


def residuals(law: ExpertLaw, points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Median and largest relative error of the law on its own points."""
    rows, active, us = np.array(points).T
    error = np.abs(law.time_us(rows, active, *QWEN3, expert_bytes=6.0 * QWEN3[0] * QWEN3[1]) / us - 1)
    return float(np.median(error)), float(error.max())


def _chip(preset: Preset) -> str:
    """System of the attention tables whose compute a preset has."""
    return {"h800_sxm": "h100_sxm", "a100_sxm_80g": "a100_sxm"}.get(preset.hardware, preset.hardware)


def _attention_floor(preset: Preset, data: Path) -> float:
    table = pd.read_csv(data / "attention_mla_16heads_bf16.csv")
    rows = table[(table.system == _chip(preset)) & (table.source.str.startswith("sglang"))]
    return 12.0 if rows.empty else round(float(rows.latency_us.min()), 1)


def _attention(preset: Preset, data: Path) -> list[dict[str, Any]]:
    """Measured prefill and decode of Qwen3-30B's grouped-query heads and of V2-Lite's latent attention."""
    made = []
    for kind, source in ATTENTION.get(_chip(preset), {}).items():
        name, heads, kv_heads = ATTENTION_FILES[kind]
        table = pd.read_csv(data / name)
        rows = table[(table.system == _chip(preset)) & (table.source == source)]
        for phase, word in (("context", "prefill"), ("generation", "decode")):
            points = rows[rows.phase == phase].groupby(["batch_size", "kv_len"]).latency_us.median().reset_index()
            shape = {"kind": kind, "phase": word, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
            columns = {"batch": points.batch_size, "length": points.kv_len, "us": points.latency_us.round(1)}
            made.append(shape | {key: column.tolist() for key, column in columns.items()})
    return made
