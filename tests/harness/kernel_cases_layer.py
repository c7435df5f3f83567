"""Bodies of the tests of whole layers over the kernels: they run where TRITON_INTERPRET=1 was set before the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from layer_cases import LAYERS, TOP_K, Case, CaseWeights, make_data, run_case

from harness.layer import Routes, build_layers
from harness.reference.gate import Gating
from harness.transport.plan import HomeScores
from harness.transport.virtual import run_virtual
from semmoe.schedule.priced import priced_owners


def virtual_layers(ranks: int, cases: list[Case]) -> list[list[Any]]:
    """Results of every case by virtual rank, everything by kernels."""
    return [run_virtual(ranks, lambda t, case=case: run_case(t, case), "triton", 300.0) for case in cases]


def homes_on_the_device(case: Case, ranks: int, kernels: str) -> list[tuple[torch.Tensor, list[int]]]:
    """(output, tokens at home) of layer 0 of every virtual rank, which assigns homes itself from scores."""
    data = make_data(case, ranks)
    rng = np.random.default_rng(0)
    score_TG = rng.integers(0, 1 << 18, (case.tokens, ranks)).astype(np.int32)
    capacity = -(-case.tokens // ranks) + 1

    def body(transport: Any) -> tuple[torch.Tensor, list[int]]:
        (layer,) = build_layers(
            transport, case.spec, data.placement, CaseWeights(), Gating(top_k=TOP_K), max_tokens=64, layers=[0]
        )
        transport.counter.reset()
        routes = Routes(torch.from_numpy(data.slots_TLk[:, 0]), data.weights_TLk[:, 0])
        scores = HomeScores(torch.from_numpy(score_TG), capacity)
        y = layer.forward(data.parts_GTH[transport.rank], routes, scores).y
        return y, transport.counter.layers[0].homes

    results = run_virtual(ranks, body, kernels, 300.0)
    expected = np.bincount(priced_owners(score_TG, capacity), minlength=ranks).tolist()
    assert [homes for _, homes in results] == expected and len(data.slots_TLk[0]) == LAYERS
    return results
