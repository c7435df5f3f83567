"""Dispatch and combine by peer pulls, per assignment and de-duplicated, with real experts between them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import kernel_cases_exchange
from kernel_cases import on_rank_zero
from rank_processes import rank_processes

COUNTS = [[1, 7, 3, 0], [0, 0, 9, 0], [3, 3, 3, 3], [4]]


@pytest.mark.parametrize("dedup", [False, True], ids=["assignment", "dedup"])
def test_virtual_ranks_give_the_layer_of_one_process_and_pull_exactly_what_they_serve(dedup: bool) -> None:
    for counts in COUNTS:
        rank_processes().run(on_rank_zero, kernel_cases_exchange.check_virtual, (counts, dedup))


def test_pulled_rows_are_those_of_the_twin() -> None:
    rank_processes().run(on_rank_zero, kernel_cases_exchange.check_pull_twin, ())


@pytest.mark.parametrize("dedup", [False, True], ids=["assignment", "dedup"])
def test_two_processes_exchange_without_a_wrong_row_under_delays(dedup: bool) -> None:
    assert rank_processes().run(kernel_cases_exchange.rounds, 4, dedup, True)[:2] == [0, 0]


def test_without_the_barrier_stale_rows_reach_the_sum() -> None:
    """Negative control of the rounds."""
    assert sum(rank_processes().run(kernel_cases_exchange.rounds, 4, True, False)[:2]) > 0


def test_what_is_timed_of_ours_between_gpus_is_right_and_reads_nothing_on_the_host() -> None:
    done = rank_processes().run(kernel_cases_exchange.check_bench_device, 2)
    ours = ["srs ours", "srs ours_in_place", "sag ours", "srs_sag ours", "exchange ours", "exchange ours_by_assignment"]
    assert done == [2 * ours, 2 * ours, [], []]
