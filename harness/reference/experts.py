"""SwiGLU experts over rows sorted by expert, and the whole MoE layer in one process: the oracle of every flow.

Letters: N rows, S slots (experts at hand), F expert width, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


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
    gate, up = functional.grouped_mm(rows_NH, w13_S2FH.transpose(1, 2), offs=ends_S).chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate) * up, w2_SHF.transpose(1, 2), offs=ends_S)


def experts_loop(rows_NH: Tensor, counts_S: list[int], w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
    """The same, one expert after the other; experts without rows cost nothing."""
    out_NH = torch.empty_like(rows_NH)
    start = 0
    for slot, count in enumerate(counts_S):
        if count:
            part = slice(start, start + count)
            gate, up = functional.linear(rows_NH[part], w13_S2FH[slot]).chunk(2, dim=-1)
            out_NH[part] = functional.linear(functional.silu(gate) * up, w2_SHF[slot])
            start += count
    return out_NH


def run_experts(rows_NH: Tensor, counts_S: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
    """Whichever of the two fits the device: CUDA takes the grouped product, a CPU gains nothing from it."""
    if rows_NH.is_cuda and grouped_available(rows_NH, w2_SHF):
        return experts_grouped(rows_NH, counts_S, w13_S2FH, w2_SHF)
    return experts_loop(rows_NH, counts_S.tolist(), w13_S2FH, w2_SHF)


def moe_reference(x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, w13_E2FH: Tensor, w2_EHF: Tensor) -> Tensor:
    """out[t] = sum_j weights[t, j] * expert(experts[t, j])(x[t]), one expert at a time, everything in fp32."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in experts_Tk.unique().tolist():
        token, choice = (experts_Tk == expert).nonzero(as_tuple=True)
        gate, up = (x_TH[token].float() @ w13_E2FH[expert].float().T).chunk(2, dim=-1)
        rows = (functional.silu(gate) * up) @ w2_EHF[expert].float().T
        out_TH.index_add_(0, token, rows * weights_Tk[token, choice, None].float())
    return out_TH
