"""Small placement problems for the tests of the policies."""

from __future__ import annotations

from typing import Any

from semmoe.placement.base import PlacementProblem
from semmoe.profile import Profile
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.trace import RoutingTrace


def cluster(nodes: int = 1, ranks_per_node: int = 8) -> ClusterSpec:
    return ClusterSpec(
        name="test",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        topology="switch",
        memory_gib=80,
        memory_gbps=3000,
        bf16_tflops=900,
        link_gbps=400,
        alpha_us=10,
        nic_gbps=50,
    )


def problem(
    trace: RoutingTrace, ep_size: int, slots: int | None = None, n_group: int = 1, **more: Any
) -> PlacementProblem:
    model = ModelSpec(
        name=trace.model,
        hidden=64,
        num_layers=int(trace.layer_ids_L[-1]) + 1,
        layer_ids=tuple(trace.layer_ids_L),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        expert_ffn=8,
        vocab_size=trace.vocab_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        n_group=n_group,
    )
    more.setdefault("cluster", cluster())
    return PlacementProblem(
        profile=Profile.fit(trace), model=model, ep_size=ep_size, slots=slots or trace.num_experts, **more
    )
