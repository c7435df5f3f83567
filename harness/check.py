"""Correctness before timing: the distributed output against the whole layer in one process, on the same inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.planning import RoutedStep

from .poison import poisoned
from .reference.experts import ExpertBiases, moe_reference
from .stack import LayerInput, Stack
from .weights import biases_of, gate_bias_of

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3, "fp8": 6e-2}  # relative norm; fp8 keeps 3 bits of mantissa


def check_step(stack: Stack, routed: RoutedStep, inputs: list[LayerInput]) -> tuple[float, float | None]:
    """(largest relative error over layers and ranks, share of (token, layer) whose free gate differs from the trace).

    Collective. Raises the same UserError on every rank where an output disagrees: nothing may be timed then.
    """
    errors_L, flips = [], 0
    stack.prepare(inputs)
    for layer, given in enumerate(inputs):
        with poisoned():
            y = stack.forward(layer, given).y
        ys = stack.transport.gather_objects((given.mine_n, y.cpu()))
        error = 0.0
        if stack.context.rank == 0:
            error, flipped = _compare(stack, layer, routed, ys)
            flips += flipped
            stack.context.progress(layer + 1, len(inputs))  # a whole model's reference takes its time
        errors_L.append(stack.transport.gather_objects(error)[0])
    worst = int(np.argmax(np.nan_to_num(errors_L, nan=np.inf)))
    limit = max(TOLERANCE[d] for d in dtypes(stack))
    if not errors_L[worst] <= limit:
        raise UserError(
            f"{stack.spec.flow}/{stack.spec.dispatcher or 'none'}: the output of MoE layer {worst} differs from the "
            f"single-process reference by {errors_L[worst]:.3g} (relative norm; at most {limit:g} is right): a fault of "
            "the data plane, so nothing was timed"
        )
    share = stack.transport.gather_objects(flips)[0] / max(len(routed.rows_T) * len(inputs), 1)
    return errors_L[worst], share if stack.feed.real else None


def dtypes(stack: Stack) -> set[str]:
    """Of everything that rounds on the way through a layer."""
    named = (stack.spec.activation_dtype, stack.spec.dispatch_dtype, stack.spec.combine_dtype)
    return {dtype for dtype in named if dtype}


def _compare(stack: Stack, layer: int, routed: RoutedStep, ys: list[tuple[np.ndarray, Tensor]]) -> tuple[float, int]:
    """(relative error of the worst rank, tokens whose free top-k set differs)."""
    expert_of_slot_P = stack.placement.physical_to_logical_LP[layer]
    experts_Tk = torch.from_numpy(expert_of_slot_P[routed.slots_TLk[:, layer]].astype(np.int64))
    x_TH = stack.feed.rows_TH(layer, routed.rows_T).to(stack.dtype)
    want_TH, free_Tk = moe_rows(stack, layer, x_TH, experts_Tk)
    flipped = int((free_Tk.sort(dim=1).values != experts_Tk.sort(dim=1).values).any(dim=1).sum())
    errors = [relative(y.float(), want_TH[torch.from_numpy(mine_n)]) for mine_n, y in ys]
    return float(np.max(errors)), flipped  # unlike max(), it keeps NaN


def moe_rows(stack: Stack, layer: int, x_TH: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """(what MoE layer `layer` makes of x_TH with forced experts, weighted as its gate does, in one process; the experts
    that its gate would choose). Computed on the device of the stack, both as CPU tensors."""
    device, dtype = stack.device, stack.dtype
    x_TH, experts_Tk = x_TH.to(device), experts_Tk.to(device)
    source = stack.feed.source
    bias_E = gate_bias_of(source, layer)
    bias_E = None if bias_E is None else bias_E.to(device, dtype)
    score_TE = stack.gating.scores(torch.nn.functional.linear(x_TH, source.gate_EH(layer).to(device, dtype), bias_E))
    weights_Tk = stack.gating.weights(score_TE, experts_Tk)
    pairs = [source.expert(layer, expert) for expert in range(source.num_experts)]
    w13_E2FH, w2_EHF = (torch.stack([pair[i] for pair in pairs]).to(device, dtype) for i in (0, 1))
    biases = biases_of(source, layer)
    biases = None if biases is None else ExpertBiases(biases.up_S2F.to(device), biases.down_SH.to(device))
    want_TH = moe_reference(x_TH, experts_Tk, weights_Tk, w13_E2FH, w2_EHF, biases)
    return want_TH.cpu(), stack.gating.choose(score_TE).cpu()


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over that of what is right; infinite for another shape."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    return float((got - want).norm() / want.norm())
