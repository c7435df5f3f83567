"""Which measurements describe each preset, and what had to be assumed where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
