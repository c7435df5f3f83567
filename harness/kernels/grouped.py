"""Grouped product over aligned blocks, with or without the SiLU gate: the two products of SwiGLU experts.

For every block b < blocks, with the expert s = block_slot[b] and its places p (see `align.py`), a = sorted[p]:

    GATED   out[a] = silu(x[row[a]] @ w[s, :N].T) * (x[row[a]] @ w[s, N:].T)      w [S, 2N, K]
    else    out[a] = x[row[a]] @ w[s].T                                          w [S, N, K]

row[a] = a without ROWS. Rows are read where they lie and written in the order of the assignments: no copy sorted by
expert, no padding in memory. Sums are fp32 ("ieee" for fp32 inputs, where TF32 would otherwise round them).

Worked example, K = N = 1, x [[2]], row [0, 0], slot [1, 0], w [[[3]], [[5]]], not gated: out [[10], [6]].

Memory ordering: none between programs; `blocks` is read on the device, programs beyond it leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .align import Alignment, moe_align


@triton.jit
def grouped_kernel(
    x,
    row,
    w,
    out,
    sorted_places,
    block_slot,
    blocks,
    assignments,
    K: tl.constexpr,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(1)
    if b >= tl.load(blocks):
        return
    a = tl.load(sorted_places + b * BLOCK_M + tl.arange(0, BLOCK_M))
    used = a < assignments
    source = a.to(tl.int64)
    if ROWS:
        source = tl.load(row + a, mask=used, other=0).to(tl.int64)
    slot = tl.load(block_slot + b).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + source[:, None] * K + k[None, :]
    w_at = w + slot * (2 * N if GATED else N) * K + n[None, :].to(tl.int64) * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    total_up = total
    for start in range(0, K, BLOCK_K):
        x_mask, w_mask = used[:, None], (n < N)[None, :]
        if K % BLOCK_K:
            inside = start + k < K
            x_mask, w_mask = x_mask & inside[None, :], w_mask & inside[:, None]
        x_MK = tl.load(x_at, mask=x_mask, other=0.0)
        w_KN = tl.load(w_at, mask=w_mask, other=0.0)
        if UPCAST:  # the interpreter has no bf16 product
            x_MK, w_KN = x_MK.to(tl.float32), w_KN.to(tl.float32)
        total = tl.dot(x_MK, w_KN, total, input_precision="ieee")
        if GATED:
            up_KN = tl.load(w_at + N * K, mask=w_mask, other=0.0)
            if UPCAST:
                up_KN = up_KN.to(tl.float32)
            total_up = tl.dot(x_MK, up_KN, total_up, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * total_up
    out_at = out + a.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=used[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class Tiling:
    """Block sizes of one product, powers of two of at least 16. Few rows an expert want a small block_m.

    The gated product makes two sums at once, of half the width each, so that both fit in the registers.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def blocks(self, gated: bool) -> dict[str, int]:
        """The kernel's constants."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": max(self.block_n // 2, 16) if gated else self.block_n,
            "BLOCK_K": self.block_k,
        }

    def fitting(self, element_bytes: int, shared_bytes: int) -> Tiling:
        """For elements wider than bf16 and GPUs with little shared memory a block (sm_86, sm_89, sm_120: 99 KiB)."""
        narrow = replace(self, block_k=self.block_k * 2 // max(element_bytes, 2))
        narrow = replace(narrow, block_n=min(self.block_n, 128)) if element_bytes > 2 else narrow
        return replace(narrow, stages=self.stages - 1) if shared_bytes < ROOMY_BYTES else narrow


ROOMY_BYTES = 128 << 10
# WIDE reads the rows least often: from Hopper on, where its sums fit into the registers of 8 warps
WIDE, PREFILL = Tiling(128, 256, 64, 8, 3), Tiling(128, 128, 64, 8, 3)
MIDDLE, DECODE = Tiling(64, 128, 64, 4, 4), Tiling(16, 128, 128, 4, 4)


def tiling_of(assignments: int, slots: int, device: torch.device) -> Tiling:
    """By the mean rows of a slot: known on the host, the same for every step of a captured graph.

    A slot's weights are read once for each of its blocks, so that most slots should need one only.
    """
    if assignments < 8 * slots:
        return DECODE
    if assignments < 48 * slots:
        return MIDDLE
    wide = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return WIDE if wide else PREFILL


def grouped_matmul(
    x_RK: Tensor,
    row_A: Tensor | None,
    w: Tensor,
    alignment: Alignment,
    gated: bool,
    tiling: Tiling,
    out_AN: Tensor | None = None,
) -> Tensor:
    """One product over an alignment; rows of `out` whose assignment is served elsewhere stay as they are."""
    if x_RK.shape[1] != w.shape[2]:
        raise ValueError(f"rows of {x_RK.shape[1]} elements, weights of {w.shape[2]}")
    if alignment.block_m != tiling.block_m:
        raise ValueError(f"aligned to {alignment.block_m} places, blocks of {tiling.block_m}")
    if x_RK.is_cuda and not torch.version.hip:
        about: Any = torch.cuda.get_device_properties(x_RK.device)
        tiling = tiling.fitting(x_RK.element_size(), about.shared_memory_per_block_optin)
    width = w.shape[1] // 2 if gated else w.shape[1]
    out = x_RK.new_empty(alignment.assignments, width) if out_AN is None else out_AN
    blocks = tiling.blocks(gated)
    grouped_kernel[(triton.cdiv(width, blocks["BLOCK_N"]), alignment.most_blocks)](
        x_RK,
        alignment.sorted_P if row_A is None else row_A,
        w,
        out,
        alignment.sorted_P,
        alignment.block_slot_B,
        alignment.blocks_1,
        alignment.assignments,
        K=x_RK.shape[1],
        N=width,
        GATED=gated,
        ROWS=row_A is not None,
        UPCAST=not x_RK.is_cuda,
        **blocks,
        num_warps=tiling.warps,
        num_stages=2 if torch.version.hip else tiling.stages,  # AMD: 64 KiB of shared memory
    )
    return out


def experts(
    x_RH: Tensor,
    row_A: Tensor | None,
    slot_A: Tensor,
    w13_S2FH: Tensor,
    w2_SHF: Tensor,
    tiling: Tiling | None = None,
    out_AH: Tensor | None = None,
) -> Tensor:
    """out[a] = expert(slot_A[a])(x[row_A[a]]) for every assignment with slot >= 0, in the order of the assignments.

    row_A None: assignment a reads row a. Three to four launches, no host round trip.
    """
    slots = len(w2_SHF)
    tiling = tiling or tiling_of(len(slot_A), slots, x_RH.device)
    alignment = moe_align(slot_A, slots, tiling.block_m)
    hidden_AF = grouped_matmul(x_RH, row_A, w13_S2FH, alignment, True, tiling)
    return grouped_matmul(hidden_AF, None, w2_SHF, alignment, False, tiling, out_AH)


def experts_by_library(x_RH: Tensor, row_A: Tensor | None, slot_A: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
    """The same between the same tensors with torch's sort, gather and `F.grouped_mm`: the baseline and the CPU path.

    Every slot_A must be >= 0.
    """
    from ..reference.experts import run_experts

    order_A = slot_A.argsort(stable=True)
    rows_AH = x_RH.index_select(0, order_A if row_A is None else row_A[order_A])
    # counts by a scatter of fixed size: bincount reads its result's size on the host, which a graph cannot capture
    counts_S = torch.zeros(len(w2_SHF), dtype=torch.int64, device=slot_A.device)
    counts_S.scatter_add_(0, slot_A.long(), torch.ones_like(slot_A, dtype=torch.int64))
    out_AH = torch.empty_like(rows_AH)
    out_AH[order_A] = run_experts(rows_AH, counts_S, w13_S2FH, w2_SHF)
    return out_AH
