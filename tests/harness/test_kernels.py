"""SRS and SAG kernels: their results in the interpreter, in other processes.

The interpreter must be chosen before a kernel is defined, so its cases run on the processes of `rank_processes`
(TRITON_INTERPRET=1), those of virtual ranks on one of them.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

import kernel_cases
import shuffle_cases
from rank_processes import rank_processes


def on_first(function: Any, *arguments: Any) -> Any:
    return rank_processes().run(kernel_cases.on_rank_zero, function, arguments)[0]


@pytest.mark.parametrize("counts", kernel_cases.COUNTS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_virtual_ranks_agree_with_the_twin_and_leave_other_rows_alone(counts: list[int], dtype: str) -> None:
    on_first(kernel_cases.check_virtual, counts, dtype)


def test_gathering_what_was_scattered_is_the_rank_order_sum_to_the_bit() -> None:
    """The whole matrix but 1,000 tokens, of which the interpreter sees two (see test_shuffle_matrix.py for all)."""
    cases = [case for case in shuffle_cases.matrix() if case[1] < 1000] + [(8, 1000, "free"), (2, 1000, "one")]
    on_first(kernel_cases.check_sums, cases)


def test_the_residual_is_added_to_the_rows_of_its_tokens() -> None:
    on_first(kernel_cases.check_residual)


def test_the_norm_fused_into_srs_is_the_norm_of_its_rows() -> None:
    on_first(kernel_cases.check_norm)


def test_expert_ids_travel_beside_the_rows_of_sag_in_one_launch() -> None:
    on_first(kernel_cases.check_carried_ids)


def test_virtual_ranks_may_not_wait_inside_a_kernel() -> None:
    on_first(kernel_cases.check_virtual_barrier_refused)


@pytest.mark.parametrize("exit_barrier", [False, True])
def test_two_processes_with_the_fused_barrier_are_exact_under_random_delays(exit_barrier: bool) -> None:
    wrong = rank_processes().run(kernel_cases.rounds, 2, 12, True, exit_barrier)
    assert wrong[:2] == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SEMMOE_SLOW"), reason="minutes in the interpreter; SEMMOE_SLOW=1 runs it")
@pytest.mark.parametrize("ranks", [4, 8])
def test_sixty_rounds_with_the_fused_barrier_are_exact(ranks: int) -> None:
    for first in range(0, 60, 2):  # few at a time: on a busy machine processes that spin wait long for their turn
        assert rank_processes(8).run(kernel_cases.rounds, ranks, 2, True, False, first)[:ranks] == [0] * ranks


def test_the_barrier_as_a_kernel_of_its_own_separates_writes_from_reads() -> None:
    assert rank_processes().run(kernel_cases.barrier_alone, 20)[:2] == [0, 0]


def test_without_the_barrier_stale_rows_are_seen() -> None:
    """Negative control: the same rounds with the late rank not waited for."""
    wrong = rank_processes().run(kernel_cases.rounds, 2, 6, False, False)
    assert sum(wrong[:2]) > 0


def test_a_rank_that_does_not_come_is_named_within_the_spin_limit() -> None:
    assert "rank 1 did not arrive at the barrier" in rank_processes().run(kernel_cases.lonely)[0]


@pytest.mark.parametrize("flow", ["tp_scattered", "tp_shuffled"])
@pytest.mark.parametrize("transport", ["shared_triton", "shared_fused"])
def test_layers_over_the_kernels_are_lossless_and_count_the_same_rows(flow: str, transport: str) -> None:
    from layer_cases import Case, check_case, run_cases

    cases = [Case(flow, "a2a_dedup", "random", tokens, "ends", residual=True, carry=True) for tokens in (0, 1, 7, 64)]
    results = rank_processes().run(run_cases, transport, 2, cases)
    for i, case in enumerate(cases):
        check_case(case, 2, [results[rank][i] for rank in range(2)], 1e-5, routes_first=True)
