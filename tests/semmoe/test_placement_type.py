"""Placement: its tables agree with its map, and an impossible map is refused with the right number beside."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.placement.base import Placement, check_divisible


def test_tables_agree_with_the_map():
    place = Placement(np.array([[0, 1, 2, 3, 1, 0], [3, 2, 1, 0, 3, -1]]), 3, (0, 1), 4)
    assert place.logical_to_physical_LEX[0].tolist() == [[0, 5], [1, 4], [2, -1], [3, -1]]
    assert place.first_slot_LE.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert place.rank_mask_LEG[0].astype(int).tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert place.rank_mask_LEG[1, 3].tolist() == [True, False, True]


def test_from_ranks_puts_every_expert_on_its_rank():
    rank_LE = np.array([[1, 0, 1, 0], [0, 0, 1, 1]])
    place = Placement.from_ranks(rank_LE, 2, (4, 5))
    assert place.physical_to_logical_LP.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert (place.rank_mask_LEG.argmax(axis=2) == rank_LE).all()


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "hint"),
    [
        (64, 64, 6, r"use a divisor of 64 \(nearest: 4\) or set placement\.slots=66"),
        (32, 30, 4, "slots=32"),
        (32, 32, 0, "at least 1"),
        (8, 8, 16, "slots=16"),
        (8, 36, 4, r"slots=36 are more than 8 experts on each of 4 ranks can fill \(32\)"),
    ],
)
def test_experts_that_do_not_divide_are_refused_with_what_would_be_right(experts, slots, ranks, hint):
    with pytest.raises(UserError, match=hint):
        check_divisible(experts, slots, ranks)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1, 2, 2]], r"experts \[3\] have no slot"),
        ([[0, 1, 2, 4]], "expert ids run 0..4"),
        ([[0, 1, 2, 3]] * 2, "1 layers"),
    ],
)
def test_maps_that_lose_an_expert_are_refused(table, message):
    with pytest.raises(UserError, match=message):
        Placement(np.array(table), 2, (0,), 4)
