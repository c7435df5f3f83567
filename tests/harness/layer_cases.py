"""Cases of the MoE layer: inputs of all ranks made from one seed, the body that a rank runs, and the oracle."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from harness.counting import Counter, traffic_of
from harness.layer import InBlock, MoELayer, Routes, build_layers
from harness.reference.experts import moe_reference
from harness.reference.gate import Gating
from harness.transport.base import Transport
from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.traffic import Traffic, count_traffic

LAYERS, EXPERTS, TOP_K, HIDDEN, FFN = 2, 8, 3, 16, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYER_IDS = tuple(range(1, LAYERS + 1))


@dataclass(frozen=True)
class Case:
    """placement: contiguous, random, or replicas (half as many slots again). homes: spread, one (rank 1), or ends
    (first and last rank only, so that ranks between them have no token)."""

    flow: str
    dispatcher: str | None
    placement: str = "random"
    tokens: int = 64
    homes: str = "spread"
    dtype: str = "fp32"
    dispatch_dtype: str | None = None
    residual: bool = False
    carry: bool = False
    hidden: int = HIDDEN
    seed: int = 0

    @property
    def spec(self) -> DispatchSpec:
        lossless = self.dispatch_dtype or (self.dtype if self.dispatcher else None)
        return DispatchSpec(
            flow=self.flow,
            dispatcher=self.dispatcher,
            hidden=self.hidden,
            top_k=TOP_K,
            activation_dtype=self.dtype,
            dispatch_dtype=lossless,
            carry_expert_ids=self.carry,
        )


class CaseWeights:
    """Small seeded experts, the same wherever they are asked for."""

    num_experts = EXPERTS

    def __init__(self, hidden: int = HIDDEN) -> None:
        self.hidden = hidden

    def gate_EH(self, layer: int) -> torch.Tensor:
        return _normal(9000 + layer, EXPERTS, self.hidden)

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        w13 = _normal(100 * layer + expert, 2 * FFN, self.hidden) / self.hidden**0.5
        return w13, _normal(5000 + 100 * layer + expert, self.hidden, FFN) / FFN**0.5


@dataclass(frozen=True, eq=False)
class Data:
    """What all ranks know: hidden states, the partial sums that give them, routes, homes [T, L] (None: tp_replicated)."""

    placement: Placement
    x_TH: torch.Tensor
    parts_GTH: torch.Tensor
    residual_TH: torch.Tensor
    experts_TLk: np.ndarray
    slots_TLk: np.ndarray
    weights_TLk: torch.Tensor
    homes_TL: np.ndarray | None


@functools.cache  # virtual ranks and the oracle share it
def make_data(case: Case, ranks: int) -> Data:
    rng = np.random.default_rng(case.seed + 17 * case.tokens)
    placement = make_placement(case.placement, ranks, rng)
    tokens, dtype = case.tokens, DTYPES[case.dtype]
    x_TH = _normal(case.seed, tokens, case.hidden).to(dtype).float()
    # Shares are powers of two and sum to one, so that partial sums round nowhere.
    shares = [0.5 ** (r + 1) for r in range(ranks)]
    shares[-1] *= 2
    experts_TLk = rng.random((tokens, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :TOP_K]
    return Data(
        placement,
        x_TH,
        torch.stack([x_TH * share for share in shares]).to(dtype),
        _normal(case.seed + 1, tokens, case.hidden).to(dtype).float(),
        experts_TLk,
        _any_slot(experts_TLk, placement, rng),
        torch.from_numpy(rng.random((tokens, LAYERS, TOP_K)).astype(np.float32)),
        _homes(case, ranks, rng),
    )


def make_placement(kind: str, ranks: int, rng: np.random.Generator) -> Placement:
    if kind == "contiguous":
        table = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    else:
        extra = EXPERTS // 2 if kind == "replicas" else 0
        rows = [np.concatenate([np.arange(EXPERTS), rng.permutation(EXPERTS)[:extra]]) for _ in range(LAYERS)]
        table = np.stack([rng.permutation(row) for row in rows])
    return Placement(table.astype(np.int32), ranks, LAYER_IDS, EXPERTS)


def run_case(transport: Transport, case: Case) -> tuple[list[torch.Tensor], Counter, list[torch.Tensor | None]]:
    """(output of every layer, counts, carried slots) of this rank. Every layer gets the same input."""
    data = make_data(case, transport.ranks)
    layers = build_layers(
        transport, case.spec, data.placement, CaseWeights(case.hidden), Gating(top_k=TOP_K), max_tokens=64
    )
    transport.counter.reset()
    outputs = [_forward(transport, case, data, layer) for layer in layers]
    counter = replace(transport.counter, layers=list(transport.counter.layers))
    return [o.y for o in outputs], counter, [o.carried_slots_Tk for o in outputs]


def run_cases(name: str, ranks: int, cases: list[Case]) -> list[Any]:
    """On a rank process: all cases over the named transport; empty on ranks that are not part of it."""
    from rank_processes import transport_of

    transport = transport_of(name, ranks)
    return [] if transport is None else [run_case(transport, case) for case in cases]


def check_case(case: Case, ranks: int, results: list[Any], tolerance: float, routes_first: bool = False) -> None:
    """Every rank's output against the single-process reference, and the counted Traffic against the routes'.

    routes_first: the exchange by kernels, whose metadata are the routes of all tokens, k slots and weights each.
    """
    data = make_data(case, ranks)
    for layer in range(LAYERS):
        expected_TH = oracle(case, data, layer)
        for rank, (outputs, _, carried) in enumerate(results):
            own = data.homes_TL[:, layer] == rank if case.flow == "dp" and data.homes_TL is not None else slice(None)
            assert outputs[layer].dtype == DTYPES[case.dtype]
            error = relative_error(outputs[layer], expected_TH[own])
            assert error <= tolerance, f"{case}, layer {layer}, rank {rank}: {error:.2e}"
            if case.carry:
                assert np.array_equal(carried[layer].numpy(), data.slots_TLk[:, layer])
    from semmoe.traffic import differences

    expected = expected_traffic(case, data)
    if routes_first:
        expected = replace(expected, metadata_bytes=float(LAYERS * case.tokens * (ranks - 1) * 8 * TOP_K))
    assert differences(traffic_of([counter for _, counter, _ in results]), expected) == []


def oracle(case: Case, data: Data, layer: int) -> torch.Tensor:
    source = CaseWeights(case.hidden)
    dtype = DTYPES[case.dtype]
    experts = [source.expert(layer, e) for e in range(EXPERTS)]
    w13, w2 = (torch.stack([pair[i] for pair in experts]).to(dtype) for i in range(2))
    x_TH = data.x_TH + data.residual_TH if case.residual else data.x_TH
    return moe_reference(x_TH, torch.from_numpy(data.experts_TLk[:, layer]), data.weights_TLk[:, layer], w13, w2)


def expected_traffic(case: Case, data: Data) -> Traffic:
    slots = data.slots_TLk.astype(np.int32)
    return count_traffic(slots, data.homes_TL, data.placement.num_slots, data.placement.ep_size, case.spec)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    norm = float(expected.norm())
    return float((got.float() - expected).norm()) / norm if norm else 0.0


def _forward(transport: Transport, case: Case, data: Data, layer: MoELayer) -> Any:
    index = layer.layer
    slots_Tk, weights_Tk = torch.from_numpy(data.slots_TLk[:, index]), data.weights_TLk[:, index]
    dtype = DTYPES[case.dtype]
    if case.flow == "dp":
        assert data.homes_TL is not None
        mine = torch.from_numpy(data.homes_TL[:, index] == transport.rank)
        return layer.forward(data.x_TH[mine].to(dtype), Routes(slots_Tk[mine], weights_Tk[mine]))
    homes_T = None if data.homes_TL is None else data.homes_TL[:, index]
    residual_TH = data.residual_TH.to(dtype) if case.residual else None
    block = InBlock(residual_TH)
    return layer.forward(data.parts_GTH[transport.rank], Routes(slots_Tk, weights_Tk), homes_T, block=block)


def _homes(case: Case, ranks: int, rng: np.random.Generator) -> np.ndarray | None:
    shape = (case.tokens, LAYERS)
    if case.flow == "tp_replicated":
        return None
    if case.homes == "one":
        return np.ones(shape, dtype=np.int64)
    homes_TL = rng.integers(0, ranks, shape)
    if case.homes == "ends":
        homes_TL = np.where(homes_TL < ranks / 2, 0, ranks - 1)
    if case.flow == "tp_shuffled":
        return homes_TL
    one = np.sort(homes_TL[:, 0]) if case.flow == "tp_scattered" else homes_TL[:, 0]
    return np.repeat(one[:, None], LAYERS, axis=1)


def _any_slot(experts_TLk: np.ndarray, placement: Placement, rng: np.random.Generator) -> np.ndarray:
    """A random copy of every chosen expert."""
    copies_LEX = placement.logical_to_physical_LEX
    slots_TLk = np.empty(experts_TLk.shape, dtype=np.int64)
    for index in np.ndindex(experts_TLk.shape):
        copies = copies_LEX[index[1], experts_TLk[index]]
        slots_TLk[index] = rng.choice(copies[copies >= 0])
    return slots_TLk


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
