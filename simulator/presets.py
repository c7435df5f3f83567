"""Public measurements into cluster presets: `python -m simulator.presets DATA_DIR` rewrites conf/cluster/*.yaml.

DATA_DIR holds the CSV files named below (columns and units in its README). `local.yaml` is left alone: it belongs to
`semmoe calibrate`. Sources by number, quoted in each preset's provenance:

    [1] ai-dynamo/aiconfigurator@095f58a5 (Apache-2.0): NCCL, fused MoE, DeepEP and attention tables
    [2] hardware_presets.csv: specifications with the source of each
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from .cost.deepep import DeepEPLaw
from .cost.experts import ExpertLaw, fit_expert_law
from .validation.deepep_law import FIT_NODES, SOURCE, laws_of, scaled

AIC = "ai-dynamo/aiconfigurator@095f58a5"
OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
QWEN3 = (2048, 768)  # hidden and FFN width of the measured experts
DEEPEP_SMS = 20  # DeepEP's Buffer.num_sms, which vLLM and SGLang keep
DEEPEP_LINKS = {  # machines on which DeepEP's normal mode runs, as its tables and LINK_GBPS name them
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "h800_sxm": "h800_sxm",
    "h20_96g": "h20",
    "b200_sxm": "b200_sxm",
    "gb200_nvl72": "gb200",
}
DEEPEP_SHAPE = {"ep_size": 8, "hidden_size": 2048, "num_topk": 8, "num_experts": 128}
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


@dataclass(frozen=True)
class Preset:
    """One preset: its row of hardware_presets.csv and which measurements describe it."""

    name: str
    hardware: str
    nccl: tuple[str, str] | None = None  # (system, version)
    moe: tuple[str, str, str] | None = None  # (system, backend, kernel)
    deepep: str | None = None  # system of its low-latency table
    nodes: int = 1
    ranks_per_node: int = 8
    nic_gbps: float = 0.0
    fabric: str = "flat"
    assumed: tuple[tuple[str, Any, str], ...] = ()  # (field, value, why) where nothing was measured


H100_MOE = ("h100_sxm", "vllm", "vllm_unquantizedfusedmoe_triton_tritonexperts")
PRESETS = (
    Preset("h100x8", "h100_sxm", ("h100_sxm", "2.29.2"), H100_MOE, "h100_sxm"),
    Preset("h100x16", "h100_sxm", ("h100_sxm", "2.29.2"), H100_MOE, "h100_sxm", nodes=2, nic_gbps=47.0),
    Preset(
        "h100x32",
        "h100_sxm",
        ("h100_sxm", "2.29.2"),
        H100_MOE,
        "h100_sxm",
        nodes=4,
        nic_gbps=47.0,
        fabric="rail",
        assumed=(("fabric", "rail", "one NDR port a GPU, one leaf a rail, full bisection (DGX SuperPOD, NVIDIA)"),),
    ),
    Preset("h200x8", "h200_sxm", ("h200_sxm", "2.29.2"), ("h200_sxm", "vllm", "Triton, six published points")),
    Preset("a100x8", "a100_sxm_80g", ("a100_sxm", "2.27.3"), ("a100_sxm", "sglang", "sglang_fused_moe_triton")),
    Preset("h800x8", "h800_sxm", None, H100_MOE),
    Preset(
        "h20x8",
        "h20_96g",
        assumed=(
            ("memory_efficiency", 0.85, "assumed as on H100: no BF16 MoE table"),
            ("max_mfu", 0.75, "assumed: a seventh of H100's FLOPS behind more bandwidth is easier to keep busy"),
            ("mfu_half_rows", 24.0, "assumed: H100's over the ratio of their FLOPS: no BF16 MoE table"),
        ),
    ),
    Preset(
        "b200x8",
        "b200_sxm",
        ("b200_sxm", "2.29.2"),
        ("b200_sxm", "vllm", "vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts"),
        "b200_sxm",
    ),
    Preset(
        "gb200x72",
        "gb200_nvl72",
        ("gb200", "2.29.2"),
        ("gb200", "vllm", "vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts"),
        ranks_per_node=72,
        assumed=(
            (
                "alpha_us",
                12.7,
                "fit over 4 GPUs; published for 32 of a rack: one-sided dispatch of one token in 21 us (FlashInfer)",
            ),
        ),
    ),
    Preset(
        "mi300x8",
        "mi300x",
        assumed=(
            ("mesh_link_gbps", 48.0, "usable of 64 raw a link (rocm.blogs.amd.com, mi300x-rccl-xgmi)"),
            ("memory_efficiency", 0.7, "assumed: no MoE table"),
            ("max_mfu", 0.35, "assumed: no MoE table"),
            ("mfu_half_rows", 60.0, "assumed as on H100: no MoE table"),
        ),
    ),
    Preset(
        "l40sx8", "l40s_pcie", ("l40s", "2.27.3"), ("l40s", "vllm", "vllm_unquantizedfusedmoe_triton_tritonexperts")
    ),
    Preset(
        "ascend910bx8",
        "ascend_910b2",
        assumed=(
            ("link_gbps", 100.0, "assumed: middle of the 65-150 GB/s that DeepEP-Ascend's A2 and A3 figures span"),
            ("mesh_link_gbps", 45.0, "assumed: 0.8 of 56 raw a link (guevara/read-it-later#11547)"),
            ("memory_efficiency", 0.65, "assumed: no MoE table"),
            ("max_mfu", 0.35, "assumed: no MoE table"),
            ("mfu_half_rows", 60.0, "assumed as on H100: no MoE table"),
        ),
    ),
)


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
    _deepep(preset, data, raw, said)
    if preset.nccl:
        raw["curves"] = curves(pd.read_csv(data / "nccl_intranode.csv"), *preset.nccl)
        said["curves"] = f"measured [1] {AIC}, nccl-tests, {preset.nccl[0]}, NCCL {preset.nccl[1]}, half precision"
    return raw | {"provenance": said}


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


def _deepep(preset: Preset, data: Path, raw: dict[str, Any], said: dict[str, str]) -> None:
    """Low latency as measured at one shape, normal mode by the law of its rows or of the source machine's."""
    held, words = {}, []
    if preset.deepep:
        held["low_latency"] = _low_latency(preset.deepep, data)
        words.append("low_latency: measured, EP8, hidden 2048, top-8 of 128, FP8 out, BF16 back")
    if preset.hardware in DEEPEP_LINKS:
        held["normal"], told = _normal(DEEPEP_LINKS[preset.hardware], data)
        words.append(told)
    if held:
        raw["deepep"] = held
        said["deepep"] = f"[1] {AIC}, DeepEP; {'; '.join(words)}"


def _low_latency(system: str, data: Path) -> dict[str, Any]:
    table = pd.read_csv(data / "deepep_low_latency.csv")
    keep = table.system == system
    for column, value in DEEPEP_SHAPE.items():
        keep &= table[column] == value
    rows = table[keep].sort_values("tokens_per_rank")
    return {
        "ranks": DEEPEP_SHAPE["ep_size"],
        "hidden": DEEPEP_SHAPE["hidden_size"],
        "top_k": DEEPEP_SHAPE["num_topk"],
        "num_experts": DEEPEP_SHAPE["num_experts"],
        "tokens_per_rank": rows.tokens_per_rank.tolist(),
        "dispatch_us": rows.dispatch_us.tolist(),
        "combine_us": rows.combine_us.tolist(),
    }


def _normal(system: str, data: Path) -> tuple[dict[str, Any], str]:
    """deepep.normal of a machine (simulator/cost/deepep.py) and where its laws come from."""
    table = pd.read_csv(data / "deepep_normal.csv")
    own = system in set(table.system)
    rows = table[table.system == (system if own else SOURCE)]
    made: dict[str, Any] = {
        "sms": DEEPEP_SMS,
        "ranks_per_node": int(rows[rows.node_num == 1].ep_size.max()),
        "nodes": max(FIT_NODES),
    }
    words = []
    for block in ("node", "between"):
        source = system if own and block in _laws(data, system) else SOURCE
        laws = _laws(data, source)[block]
        if source != system:
            laws = {op: scaled(law, system) for op, law in laws.items()}
        made[block] = {} if source == system else {"from": source}
        made[block] |= {op: _constants(law) for op, law in laws.items()}
        words.append(f"{block} fitted to {source}" + ("" if source == system else ", links by the datasheets"))
    said = f"normal: {', '.join(words)}, all shapes and SM counts; {DEEPEP_SMS} SMs are the engines' default"
    return made, said


@cache
def _laws(data: Path, system: str) -> dict[str, dict[str, DeepEPLaw]]:
    return laws_of(pd.read_csv(data / "deepep_normal.csv"), system)


def _constants(law: DeepEPLaw) -> dict[str, float]:
    """The law's figures to four digits; what is nothing is left out."""
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(law).items()}
    return {name: value for name, value in rounded.items() if value > 1e-4}


class _Flow(list):  # type: ignore[type-arg]
    """A list that stands on one line of YAML."""


def render(raw: dict[str, Any]) -> str:
    """YAML text: scalars first, number lists in flow style."""

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        _Flow, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
    )

    def flow(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: flow(value) for key, value in node.items()}
        if isinstance(node, list) and node and not isinstance(node[0], dict):
            return _Flow(node)
        return [flow(value) for value in node] if isinstance(node, list) else node

    head = "# Written by `python -m simulator.presets DATA_DIR` from public measurements; edit the script, not this file.\n"
    return head + yaml.dump(flow(raw), Dumper=Dumper, sort_keys=False, width=118, allow_unicode=True)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__)
        return 2
    target = Path(__file__).resolve().parents[1] / "conf" / "cluster"
    for preset in PRESETS:
        raw = build(preset, Path(argv[0]))
        (target / f"{preset.name}.yaml").write_text(render(raw))
        print(f"{preset.name}: {raw['provenance']['experts']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
