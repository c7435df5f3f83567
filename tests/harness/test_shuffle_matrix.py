"""SRS and SAG of every transport over the whole matrix of ranks, tokens and counts, and many skewed rounds in a row."""

from __future__ import annotations

import pytest
import shuffle_cases
from rank_processes import rank_processes

from harness.transport.virtual import run_virtual


@pytest.mark.parametrize("transport", ["collective", "shared"])
def test_processes_give_the_rank_order_sum_to_the_bit_in_every_case(transport: str) -> None:
    assert rank_processes(8).run(shuffle_cases.wrong_on_process, transport) == [[]] * 8


@pytest.mark.parametrize("ranks", shuffle_cases.RANKS)
def test_virtual_ranks_do_so_too(ranks: int) -> None:
    assert run_virtual(ranks, shuffle_cases.wrong_cases) == [[]] * ranks


@pytest.mark.parametrize("ranks", [4, 8])
def test_sixty_skewed_rounds_with_random_delays_have_no_wrong_row(ranks: int) -> None:
    assert rank_processes(8).run(shuffle_cases.skewed_rounds, ranks, 60, True) == [0] * 8


def test_without_waiting_the_rounds_are_seen_to_fail() -> None:
    """Negative control."""
    assert sum(rank_processes(8).run(shuffle_cases.skewed_rounds, 4, 20, False)) > 0


def test_the_matrix_covers_what_it_says() -> None:
    cases = shuffle_cases.matrix()
    assert (8, 39, "skewed") in cases and (4, 1000, "one") in cases and (1, 0, "free") in cases
    assert {w for w, _, _ in cases} == {1, 2, 4, 8} and {t for _, t, _ in cases} >= {0, 1, 7, 64, 1000}
