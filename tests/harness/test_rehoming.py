"""Outputs summed at a new home: the same numbers as at the old one, and the Traffic that the core counts from the routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_trace
from traffic_cases import HIDDEN, RANKS, SLOTS, Scores

from harness.counting import gather_traffic
from harness.layer import Routes, build_layers
from harness.reference.gate import Gating
from harness.transport.virtual import run_virtual
from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.planning import RoutedStep, StepPlanner
from semmoe.replica_router import LeastLoaded
from semmoe.schedule.rehome import Rehome
from semmoe.schedule.semantic import Semantic
from semmoe.traffic import Traffic, count_traffic, differences

SPEC = DispatchSpec(flow="tp_shuffled", dispatcher="a2a_dedup", hidden=HIDDEN, top_k=2, activation_dtype="fp32")


class Weights:
    hidden, num_experts = HIDDEN, 8

    def gate_EH(self, layer: int) -> torch.Tensor:
        return torch.ones(self.num_experts, HIDDEN)

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(10 * layer + expert)
        return torch.randn(32, HIDDEN, generator=made), torch.randn(HIDDEN, 16, generator=made)


def step(scheduler: Any, tokens: int) -> tuple[Placement, RoutedStep]:
    trace = make_trace()
    rng = np.random.default_rng(5)
    rows = [rng.permutation(np.concatenate([np.arange(8), rng.permutation(8)[:4]])) for _ in range(trace.num_layers)]
    placement = Placement(np.stack(rows).astype(np.int32), RANKS, tuple(trace.layer_ids_L), 8)
    planner = StepPlanner(trace, placement, SPEC, scheduler, Scores(), LeastLoaded(), home_cap=1.2)
    return placement, planner.route(np.sort(rng.choice(trace.num_tokens, tokens, replace=False)), None)


def execute(transport: Any, scheduler: Any, tokens: int) -> tuple[list[torch.Tensor], Traffic]:
    placement, routed = step(scheduler, tokens)
    layers = build_layers(transport, SPEC, placement, Weights(), Gating(top_k=2))
    transport.counter.reset()
    x_TH = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)) * (2 * transport.rank + 1) / RANKS**2
    outputs = []
    for index, layer in enumerate(layers):
        slots_Tk = torch.from_numpy(routed.slots_TLk[:, index].astype(np.int64))
        returns_T = None if routed.returns_TL is None else routed.returns_TL[:, index]
        assert routed.homes_TL is not None
        outputs.append(layer.forward(x_TH, Routes(slots_Tk), routed.homes_TL[:, index], returns_T=returns_T).y)
    return outputs, gather_traffic(transport)


@pytest.mark.parametrize("tokens", [61, 3, 0])
def test_outputs_are_those_of_the_old_home_and_traffic_that_of_the_routes(tokens: int) -> None:
    plain = run_virtual(RANKS, lambda t: execute(t, Semantic(), tokens))
    moved = run_virtual(RANKS, lambda t: execute(t, Rehome(), tokens))
    _, routed = step(Rehome(), tokens)
    wanted = count_traffic(routed.slots_TLk, routed.homes_TL, SLOTS, RANKS, SPEC, returns_TL=routed.returns_TL)
    for (ys, _), (zs, counted) in zip(plain, moved, strict=True):
        for y, z in zip(ys, zs, strict=True):
            assert torch.allclose(y, z, atol=1e-4)
        assert differences(counted, wanted) == []


def test_a_wrong_new_home_of_one_token_is_seen() -> None:
    """Negative control: the ranks sum one token elsewhere than the plan says."""
    _, routed = step(Rehome(), 61)
    assert routed.returns_TL is not None
    wanted = count_traffic(routed.slots_TLk, routed.homes_TL, SLOTS, RANKS, SPEC, returns_TL=routed.returns_TL)
    other = routed.returns_TL.copy()
    other[0, 0] = (other[0, 0] + 1) % RANKS
    assert differences(count_traffic(routed.slots_TLk, routed.homes_TL, SLOTS, RANKS, SPEC, returns_TL=other), wanted)


def test_free_gating_and_other_dispatchers_are_refused() -> None:
    def free(transport: Any) -> None:
        placement, _ = step(Rehome(), 8)
        (layer,) = build_layers(
            transport, SPEC, placement, Weights(), Gating(top_k=2), router=LeastLoaded(), layers=[0]
        )
        layer.forward(torch.ones(8, HIDDEN), None, np.zeros(8, dtype=np.int64), returns_T=np.zeros(8, dtype=np.int64))

    with pytest.raises(UserError, match="forced routes"):
        run_virtual(RANKS, free)
