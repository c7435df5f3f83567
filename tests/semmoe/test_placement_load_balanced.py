"""LPT with exchanges against enumeration, with and without copies."""

from __future__ import annotations

import numpy as np
import pytest
from placement_problems import problem

from semmoe.errors import UserError
from semmoe.placement.enumeration import placements
from semmoe.placement.load_balanced import PEAK, SPREAD, LoadBalanced, balance, cost, first_fit
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=6, prompt_len=30, output_len=0, num_experts=8, top_k=2, layers=3, groups=4, topics=4).make()


def peaks(placement, load_LE: np.ndarray) -> np.ndarray:
    share = load_LE[:, :, None] * placement.rank_mask_LEG / placement.rank_mask_LEG.sum(axis=2, keepdims=True)
    load_LG = share.sum(axis=1)
    return load_LG.max(axis=1) / load_LG.mean(axis=1)


def test_lpt_by_hand() -> None:
    # 9 -> rank 0, 8 -> rank 1, 7 -> rank 1 (8 < 9), 1 -> rank 0
    assert first_fit(np.array([9.0, 8, 7, 1]), np.full(4, -1), 2).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(("experts", "ranks"), [(8, 4), (8, 2), (9, 3)])
@pytest.mark.parametrize("aim", [PEAK, SPREAD])
def test_within_a_percent_of_the_enumerated_optimum_on_20_cases(experts: int, ranks: int, aim: int) -> None:
    ways = placements(experts, ranks, False)
    for seed in range(20):
        load = np.round(np.random.default_rng(seed).lognormal(3, 0.8, experts))
        nothing = np.full(experts, -1)
        best = min(cost(load, way.astype(np.int64), ranks, aim) for way in ways)
        found = cost(load, balance(load, nothing, ranks, aim, 32, 0), ranks, aim)
        assert found <= best * 1.01 + 1e-9


def test_exchanges_matter_so_the_test_above_can_fail() -> None:
    ways, worse = placements(9, 3, False), 0
    for seed in range(20):
        load = np.round(np.random.default_rng(seed).lognormal(3, 0.8, 9))
        best = min(cost(load, way.astype(np.int64), 3, PEAK) for way in ways)
        worse += cost(load, balance(load, np.full(9, -1), 3, PEAK, 0, 0), 3, PEAK) > 1.01 * best
    assert worse > 0


def test_copies_of_one_kind_never_meet() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        kind = np.repeat([0, 1, 2, -1], [4, 3, 2, 7])
        rank = balance(rng.lognormal(0, 1, 16), kind, 4, PEAK, 8, seed)
        assert (np.bincount(rank) == 4).all()
        for k in range(3):
            assert len(np.unique(rank[kind == k])) == (kind == k).sum()


@pytest.mark.parametrize("slots", [8, 12, 16, 32])
def test_every_slot_serves_and_exchanges_never_raise_the_peak(slots: int) -> None:
    given = problem(TRACE, 4, slots)
    placed = LoadBalanced().place(given)
    assert placed.slots_per_rank == slots // 4
    plain = LoadBalanced(kicks=0).place(given)
    assert np.all(peaks(placed, given.profile.load_LE) <= peaks(plain, given.profile.load_LE) + 1e-9)
    assert placed.rank_mask_LEG.sum() == 3 * slots  # no copy is wasted beside another


def test_uneven_counts_and_bad_parameters() -> None:
    placed = LoadBalanced().place(problem(TRACE, 3, slots=9))
    assert placed.physical_to_logical_LP.shape == (3, 9)
    with pytest.raises(UserError, match=r"placement\.kicks=-1"):
        LoadBalanced(kicks=-1)
