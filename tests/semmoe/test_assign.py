"""The exact assignment kernels against scipy's expanded linear assignment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from semmoe.assign import assign_capped, assign_equal, narrowed
from semmoe.errors import UserError


def best_value(score_TG: np.ndarray, capacity_G: np.ndarray) -> int:
    """Optimum by scipy with every rank repeated capacity_g times."""
    columns = np.repeat(np.arange(score_TG.shape[1]), capacity_G)
    wide = score_TG.astype(np.int64)[:, columns]
    row, col = linear_sum_assignment(wide.astype(np.float64), maximize=True)
    return int(wide[row, col].sum())


def value(score_TG: np.ndarray, owner_T: np.ndarray) -> int:
    return int(score_TG.astype(np.int64)[np.arange(len(owner_T)), owner_T].sum())


@st.composite
def instances(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    items, ranks = draw(st.integers(0, 40)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.sampled_from([0, 2, 50, 2**31 - 1]))
    score = rng.integers(-width, width + 1, size=(items, ranks)).astype(np.int32)
    if draw(st.booleans()):
        score[:, 0] = score.max(initial=0)  # everybody wants rank 0: long chains
    capacity = np.full(ranks, -(-items // ranks))
    if draw(st.booleans()):
        capacity = capacity + rng.integers(0, 4, size=ranks)
    if draw(st.booleans()) and ranks > 2:
        capacity[1] += capacity[-1]  # unequal ranks, one of them closed
        capacity[-1] = 0
    return score, capacity


@settings(max_examples=300, deadline=None)
@given(instances())
def test_value_equals_the_expanded_optimum_and_capacity_holds(instance: tuple[np.ndarray, np.ndarray]) -> None:
    score_TG, capacity_G = instance
    owner_T = assign_capped(score_TG, capacity_G)
    assert (np.bincount(owner_T, minlength=len(capacity_G)) <= capacity_G).all()
    assert value(score_TG, owner_T) == best_value(score_TG, capacity_G)
    assert np.array_equal(owner_T, assign_capped(score_TG, capacity_G))


def test_greedy_order_would_lose_so_the_check_above_can_fail() -> None:
    score = np.array([[10, 9, 0], [10, 2, 8], [10, 9, 9]], dtype=np.int32)
    owner = assign_capped(score, 1)
    greedy = np.array([0, 1, 2])  # first come, first served
    assert value(score, owner) == best_value(score, np.ones(3, dtype=int)) > value(score, greedy)


def test_medium_batch_of_512_tokens_at_capacity_exactly_the_mean() -> None:
    rng = np.random.default_rng(3)
    score = (rng.gumbel(size=(512, 8)) * 9000 + rng.normal(size=(1, 8)) * 9000).astype(np.int32)
    owner = assign_capped(score, 64)
    assert (np.bincount(owner, minlength=8) == 64).all()
    assert value(score, owner) == best_value(score, np.full(8, 64))


def test_all_equal_scores_move_the_lowest_items_first() -> None:
    owner = assign_capped(np.zeros((6, 3), dtype=np.int32), 2)
    assert owner.tolist() == [1, 1, 2, 2, 0, 0]


def test_no_items() -> None:
    assert assign_capped(np.zeros((0, 4), dtype=np.int32), 0).shape == (0,)


def test_without_pressure_everyone_sits_at_the_first_best_rank() -> None:
    score = np.array([[1, 5, 5], [7, 0, 1]], dtype=np.int32)
    assert assign_capped(score, 2).tolist() == [1, 0]


def test_equal_quota_and_int64_scores() -> None:
    rng = np.random.default_rng(0)
    score = rng.integers(0, 2**40, size=(12, 4))
    owner = assign_equal(score)
    assert (np.bincount(owner, minlength=4) == 3).all()
    assert value(narrowed(score), owner) == best_value(narrowed(score), np.full(4, 3))
    with pytest.raises(UserError, match="10 items cannot be split evenly over 4 ranks"):
        assign_equal(score[:10])


def test_bad_input_is_explained() -> None:
    with pytest.raises(UserError, match="5 items do not fit on 2 ranks"):
        assign_capped(np.zeros((5, 2), dtype=np.int32), 2)
    with pytest.raises(UserError, match="outside int32"):
        assign_capped(np.full((1, 2), 2**40), 1)
    with pytest.raises(UserError, match="ranks >= 1"):
        assign_capped(np.zeros((3, 0), dtype=np.int32), 2)
