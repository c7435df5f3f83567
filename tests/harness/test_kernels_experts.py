"""Grouped product with SiLU gate: in the interpreter against one assignment after the other, and F.grouped_mm."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import kernel_cases_experts
import torch
from kernel_cases import on_rank_zero
from rank_processes import rank_processes

from harness.kernels.align import Alignment
from harness.kernels.grouped import DECODE, MIDDLE, PREFILL, WIDE, Tiling, grouped_matmul, tiling_of


def test_experts_over_aligned_blocks_equal_one_assignment_after_the_other() -> None:
    rank_processes().run(on_rank_zero, kernel_cases_experts.check_experts, ())


def test_bf16_rows_are_summed_in_fp32_and_no_rows_are_no_work() -> None:
    rank_processes().run(on_rank_zero, kernel_cases_experts.check_bf16_and_no_rows, ())


def test_the_tiling_follows_the_rows_of_an_expert_and_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [tiling_of(rows * 128, 128, cpu) for rows in (7, 8, 47, 48)] == [DECODE, MIDDLE, MIDDLE, PREFILL]
    for capability, expected in {(8, 0): PREFILL, (9, 0): WIDE, (10, 0): WIDE, (12, 0): PREFILL}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert tiling_of(8192, 128, gpu) is expected and tiling_of(1, 128, gpu) is DECODE


def test_a_tiling_takes_no_more_shared_memory_than_there_is() -> None:
    """fp32 elements are twice as wide; blocks of sm_89 have 99 KiB."""
    assert WIDE.fitting(2, 227 << 10) == WIDE
    assert WIDE.fitting(4, 227 << 10) == PREFILL.fitting(4, 227 << 10) == Tiling(128, 128, 32, 8, 3)
    for tiling in (PREFILL, MIDDLE, DECODE):
        small = tiling.fitting(2, 99 << 10)
        assert (small.stages - 1) * (small.block_m + small.block_n) * small.block_k * 2 <= 99 << 10


def test_weights_or_blocks_that_do_not_fit_are_refused() -> None:
    places = torch.zeros(16, dtype=torch.int32)
    alignment = Alignment(places, places[:1], places[:1], places[:1], 16, 1)
    with pytest.raises(ValueError, match="rows of 8 elements, weights of 4"):
        grouped_matmul(torch.zeros(1, 8), None, torch.zeros(1, 8, 4), alignment, True, DECODE)
    with pytest.raises(ValueError, match="aligned to 16 places, blocks of 128"):
        grouped_matmul(torch.zeros(1, 8), None, torch.zeros(1, 8, 8), alignment, True, PREFILL)
