"""Balanced partition of the co-activation graph, against enumeration and a planted optimum."""

from __future__ import annotations

import numpy as np
import pytest
from placement_problems import problem

from semmoe.errors import UserError
from semmoe.placement import occult
from semmoe.placement.enumeration import placements
from semmoe.placement.occult import Occult, bisected, equal_parts, metis_parts
from semmoe.placement.partition import improve, kept, polish
from semmoe.placement.random import Random
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=6, prompt_len=30, output_len=0, num_experts=8, top_k=2, layers=3, groups=4, topics=4).make()


def graph(seed: int, experts: int = 8) -> np.ndarray:
    weight = np.random.default_rng(seed).gamma(0.5, 10.0, (experts, experts))
    weight = weight + weight.T
    np.fill_diagonal(weight, 0.0)
    return weight


def test_kept_counts_each_edge_once() -> None:
    weight = np.array([[9.0, 1, 2], [1, 9, 4], [2, 4, 9]])
    assert kept(weight, np.array([0, 0, 1])) == 1.0
    assert kept(weight, np.array([0, 0, 0])) == 7.0


@pytest.mark.parametrize(("experts", "ranks"), [(8, 4), (8, 2), (9, 3)])
def test_within_a_percent_of_the_enumerated_optimum_on_20_cases(experts: int, ranks: int) -> None:
    ways = placements(experts, ranks, False)
    for seed in range(20):
        weight = graph(seed, experts)
        best = max(kept(weight, way) for way in ways)
        group = equal_parts(weight, bisected(weight, ranks, 0), ranks)
        polish(weight, group, ranks, experts // ranks, 24, 0)
        assert (np.bincount(group) == experts // ranks).all()
        assert kept(weight, group) >= 0.99 * best


def test_one_descent_is_not_enough_so_the_test_above_can_fail() -> None:
    ways, worse = placements(8, 4, False), 0
    for seed in range(20):
        weight, group = graph(seed), np.arange(8) % 4
        improve(weight, group, 4, 2)
        worse += kept(weight, group) < 0.99 * max(kept(weight, way) for way in ways)
    assert worse > 0


def test_moves_to_empty_places_respect_the_least_size() -> None:
    for seed in range(10):
        weight = graph(seed)
        group = np.concatenate([np.arange(8) % 4, np.arange(4)])  # one empty place in each of 4 groups of 3
        polish(weight, group, 4, 1, 8, seed)
        sizes = np.bincount(group[:8], minlength=4)
        assert sizes.min() >= 1 and sizes.max() <= 3
        assert (np.bincount(group) == 3).all()


def test_unequal_parts_become_equal() -> None:
    weight = graph(1)
    part = equal_parts(weight, np.array([0, 0, 0, 0, 0, 1, 1, 1]), 2)
    assert (np.bincount(part) == 4).all()


@pytest.mark.parametrize("slots", [8, 9, 12])
def test_keeps_more_pairs_together_than_chance(slots: int) -> None:
    ranks = 3 if slots == 9 else 4
    given = problem(TRACE, ranks, slots, seed=1)
    placed, chance = Occult().place(given), Random().place(given)
    assert placed.physical_to_logical_LP.min() >= 0

    def fan_out(placement) -> float:
        mask = placement.rank_mask_LEG
        return float(np.mean([mask[i][TRACE.experts_TLk[:, i]].any(axis=1).sum(axis=1).mean() for i in range(3)]))

    if slots == 8:
        assert fan_out(placed) < fan_out(chance)
    assert placed.notes["kept_share"] > 1 / ranks


@pytest.mark.skipif(occult.pymetis is None, reason="pymetis is not installed")
def test_metis_parts_are_a_partition() -> None:
    part = metis_parts(graph(0, 16), 4, 0)
    assert set(part) == {0, 1, 2, 3}


def test_bad_parameters() -> None:
    with pytest.raises(UserError, match=r"placement\.method='x'"):
        Occult(method="x")
    if occult.pymetis is None:
        with pytest.raises(UserError, match="needs pymetis"):
            Occult(method="metis")
