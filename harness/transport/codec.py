"""Rows in the dtype in which they travel: plain casts, and fp8 e4m3 with one fp32 scale per 128 elements."""

from __future__ import annotations

import torch
from torch import Tensor

from semmoe.dispatch import FP8_BLOCK
from semmoe.errors import UserError

from .packing import row_bytes

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8_MAX = 448.0  # largest finite e4m3


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of an activation dtype; UserError for one that this harness cannot compute in."""
    if name not in TORCH_DTYPES:
        raise UserError(f"dtype {name}: the harness computes in {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[name]


def check_row_dtype(name: str) -> None:
    """UserError when rows cannot travel in this dtype."""
    if name != "fp8" and name not in TORCH_DTYPES:
        raise UserError(f"rows cannot travel as {name}; use fp8, {', '.join(TORCH_DTYPES)}")


def encode(rows_NH: Tensor, dtype: str) -> Tensor:
    """Rows as they travel: [N, H] of `dtype`, or uint8 [N, H + 4 * ceil(H / 128)] for fp8.

    fp8: each block of 128 is divided by its scale = max|x| / 448; the scales follow the row. A block of zeros has
    scale 1. Example of one block: max 896 -> scale 2, and the value 7 is stored as 3.5.
    """
    if dtype != "fp8":
        return rows_NH.to(TORCH_DTYPES[dtype])
    rows, hidden = rows_NH.shape
    blocks = -(-hidden // FP8_BLOCK)
    padded = torch.nn.functional.pad(rows_NH.float(), (0, blocks * FP8_BLOCK - hidden)).view(rows, blocks, FP8_BLOCK)
    scale_NB = padded.abs().amax(dim=2) / FP8_MAX
    scale_NB = torch.where(scale_NB > 0, scale_NB, torch.ones_like(scale_NB))
    quantised = (padded / scale_NB[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    values = quantised.view(rows, blocks * FP8_BLOCK)[:, :hidden].contiguous().view(torch.uint8)
    return torch.cat([values, scale_NB.contiguous().view(torch.uint8)], dim=1)


def decode(rows: Tensor, hidden: int, dtype: str, out_dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`: [N, hidden] of out_dtype."""
    if dtype != "fp8":
        return rows.to(out_dtype)
    blocks = -(-hidden // FP8_BLOCK)
    values = rows[:, :hidden].contiguous().view(torch.float8_e4m3fn).float()
    scale_NB = rows[:, hidden:].contiguous().view(torch.float32)
    scale_NH = scale_NB.repeat_interleave(FP8_BLOCK, dim=1)[:, :hidden] if blocks > 1 else scale_NB
    return (values * scale_NH).to(out_dtype)


def bytes_of(rows: Tensor) -> Tensor:
    """The same rows as uint8 [N, row bytes]: gloo knows only a few dtypes, and a copy needs none."""
    if not rows.numel():  # strides of an empty tensor may be anything
        return torch.empty(len(rows), row_bytes(rows), dtype=torch.uint8, device=rows.device)
    rows = rows.contiguous()
    return rows if rows.dtype == torch.uint8 else rows.flatten(1).view(torch.uint8)
