"""SwiGLU experts over rows sorted by expert, and the whole MoE layer in one process: the oracle of every flow.

Letters: N rows, S slots (experts at hand), F expert width, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class ExpertBiases:
    """What GPT-OSS experts have beside the two products: biases, and an activation of its own (its published code):

        out = w2 @ (gate * sigmoid(1.702 gate) * (up + 1)) + b2,   gate = min(., 7) and up = clamp(., -7, 7) of w13 @ x + b13

    up_S2F [S, 2F]: gate above up; down_SH [S, H]. S slots, or all experts.
    """

    up_S2F: Tensor
    down_SH: Tensor

    def of(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.up_S2F[slot], self.down_SH[slot]


CLAMP, SWISH = 7.0, 1.702  # of GPT-OSS


def swiglu(both_N2F: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = both_N2F.chunk(2, dim=-1)
    return functional.silu(gate) * up


def clamped_swiglu(both_N2F: Tensor) -> Tensor:
    """See ExpertBiases."""
    gate, up = both_N2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(SWISH * gate) * (up + 1)


def expert_rows(rows_NH: Tensor, w13_2FH: Tensor, w2_HF: Tensor, biases: tuple[Tensor, Tensor] | None) -> Tensor:
    """One expert's output of its rows."""
    if biases is None:
        return functional.linear(swiglu(functional.linear(rows_NH, w13_2FH)), w2_HF)
    up_2F, down_H = biases
    return functional.linear(clamped_swiglu(functional.linear(rows_NH, w13_2FH, up_2F)), w2_HF, down_H)


def grouped_available(rows_NH: Tensor, w2_SHF: Tensor) -> bool:
    """Whether F.grouped_mm can take these tensors: torch >= 2.10, strides in multiples of 16 bytes, bf16 on CUDA."""
    if not hasattr(functional, "grouped_mm") or (rows_NH.is_cuda and rows_NH.dtype != torch.bfloat16):
        return False
    hidden, width = w2_SHF.shape[-2], w2_SHF.shape[-1]
    size = rows_NH.element_size()
    return hidden * size % 16 == 0 and width * size % 16 == 0


def experts_grouped(rows_NH: Tensor, counts_S: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
    """Two grouped products: rows of slot s are the next counts_S[s] of rows_NH. Returns [N, H]."""
    ends_S = counts_S.cumsum(0).to(torch.int32)
    both_N2F = functional.grouped_mm(rows_NH, w13_S2FH.transpose(1, 2), offs=ends_S)
    return functional.grouped_mm(swiglu(both_N2F), w2_SHF.transpose(1, 2), offs=ends_S)


def experts_loop(
    rows_NH: Tensor, counts_S: list[int], w13_S2FH: Tensor, w2_SHF: Tensor, biases: ExpertBiases | None = None
) -> Tensor:
    """The same, one expert after the other; experts without rows cost nothing."""
    out_NH = torch.empty_like(rows_NH)
    start = 0
    for slot, count in enumerate(counts_S):
        if count:
            part = slice(start, start + count)
            own = None if biases is None else biases.of(slot)
            out_NH[part] = expert_rows(rows_NH[part], w13_S2FH[slot], w2_SHF[slot], own)
            start += count
    return out_NH


def run_experts(
    rows_NH: Tensor, counts_S: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor, biases: ExpertBiases | None = None
) -> Tensor:
    """Whichever of the two fits the device: CUDA takes the grouped product, a CPU gains nothing from it."""
    if biases is None and rows_NH.is_cuda and grouped_available(rows_NH, w2_SHF):
        return experts_grouped(rows_NH, counts_S, w13_S2FH, w2_SHF)
    return experts_loop(rows_NH, counts_S.tolist(), w13_S2FH, w2_SHF, biases)


def moe_reference(
    x_TH: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w13_E2FH: Tensor,
    w2_EHF: Tensor,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """out[t] = sum_j weights[t, j] * expert(experts[t, j])(x[t]), one expert at a time, everything in fp32."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in experts_Tk.unique().tolist():
        token, choice = (experts_Tk == expert).nonzero(as_tuple=True)
        own = None if biases is None else (biases.up_S2F[expert].float(), biases.down_SH[expert].float())
        rows = expert_rows(x_TH[token].float(), w13_E2FH[expert].float(), w2_EHF[expert].float(), own)
        out_TH.index_add_(0, token, rows * weights_Tk[token, choice, None].float())
    return out_TH
