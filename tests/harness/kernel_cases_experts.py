"""Bodies of the tests of the grouped product: they run where TRITON_INTERPRET=1 was set before the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def one_by_one(x_RH: Tensor, row_A: Tensor, slot_A: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
    """The oracle: each assignment alone, in fp32."""
    out = []
    for row, slot in zip(row_A.tolist(), slot_A.tolist(), strict=True):
        gate, up = (w13_S2FH[slot].float() @ x_RH[row].float()).chunk(2)
        out.append(w2_SHF[slot].float() @ (functional.silu(gate) * up))
    return torch.stack(out)


def case(rows: int, assignments: int, slots: int, hidden: int, width: int, absent: bool) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(rows)
    x_RH = torch.randn(rows, hidden, generator=made)
    row_A = torch.randint(0, rows, (assignments,), generator=made)
    slot_A = torch.randint(-1 if absent else 0, slots, (assignments,), generator=made)
    slot_A[slot_A == 1] = 0  # slot 1 has no row
    w13_S2FH = torch.randn(slots, 2 * width, hidden, generator=made) / hidden**0.5
    return x_RH, row_A, slot_A, w13_S2FH, torch.randn(slots, hidden, width, generator=made) / width**0.5


def check_experts() -> None:
    """More than one block a slot, widths that fill no block, rows read twice, assignments of other ranks."""
    from harness.kernels.grouped import Tiling, experts, experts_by_library

    for absent in (False, True):
        x_RH, row_A, slot_A, w13, w2 = case(20, 70, 3, 40, 24, absent)
        out_AH = torch.full((70, 40), torch.nan)
        got_AH = experts(x_RH, row_A, slot_A, w13, w2, Tiling(16, 32, 32, 4, 2), out_AH)
        mine_A = slot_A >= 0
        expected = one_by_one(x_RH, row_A[mine_A], slot_A[mine_A], w13, w2)
        torch.testing.assert_close(got_AH[mine_A], expected, rtol=1e-5, atol=1e-5)
        assert got_AH[~mine_A].isnan().all() and bool((~mine_A).any()) == absent
        if not absent:
            torch.testing.assert_close(experts_by_library(x_RH, row_A, slot_A, w13, w2), got_AH, rtol=1e-5, atol=1e-5)
            swapped = experts_by_library(x_RH, row_A.flip(0), slot_A, w13, w2)
            assert (swapped - got_AH).abs().max() > 0.1  # negative control: the comparison sees other rows


def check_bf16_and_no_rows() -> None:
    from harness.kernels.grouped import DECODE, experts

    x_RH, row_A, slot_A, w13, w2 = (t.bfloat16() if t.is_floating_point() else t for t in case(5, 9, 2, 32, 16, False))
    got_AH = experts(x_RH, row_A, slot_A, w13, w2, DECODE)
    expected = one_by_one(x_RH, row_A, slot_A, w13, w2)
    assert got_AH.dtype == torch.bfloat16
    torch.testing.assert_close(got_AH.float(), expected, rtol=0.05, atol=0.03)
    assert experts(x_RH, row_A[:0], slot_A[:0], w13, w2).shape == (0, 32)
