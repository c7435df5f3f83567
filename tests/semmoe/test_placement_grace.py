"""GRACE-MoE's placement against enumeration of its own objective, its size bounds and its rule of copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_problems import cluster, problem

from semmoe.errors import UserError
from semmoe.placement.grace import Grace, bounded, copy_hot, size_bounds, spectral_groups
from semmoe.placement.partition import kept
from semmoe.placement.random import Random
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=8, prompt_len=40, output_len=0, num_experts=8, top_k=2, layers=3, groups=4, topics=4).make()


def graph(seed: int, experts: int = 8) -> np.ndarray:
    weight = np.random.default_rng(seed).gamma(0.5, 10.0, (experts, experts))
    weight = weight + weight.T
    np.fill_diagonal(weight, 0.0)
    return weight


def groupings(experts: int, groups: int, fewest: int, most: int) -> list[np.ndarray]:
    ways = np.array([w for w in itertools.product(range(groups), repeat=experts) if w[0] == 0])
    sizes = np.stack([(ways == g).sum(axis=1) for g in range(groups)])
    return list(ways[(sizes.min(axis=0) >= fewest) & (sizes.max(axis=0) <= most)])


@pytest.mark.parametrize("room", [4, 5])
def test_within_a_percent_of_the_enumerated_optimum_on_20_cases(room: int) -> None:
    fewest, most = size_bounds(8, 2, 0.3, room)
    assert (fewest, most) == ((4, 4) if room == 4 else (3, 5))
    ways = groupings(8, 2, fewest, most)
    for seed in range(20):
        weight = graph(seed)
        group = Grace(size_slack=0.3).group(weight, 2, fewest, most, 0)
        sizes = np.bincount(group, minlength=2)
        assert fewest <= sizes.min() and sizes.max() <= most
        assert kept(weight, group) >= 0.99 * max(kept(weight, way) for way in ways)


def test_the_spectral_start_alone_is_not_enough_so_the_test_above_can_fail() -> None:
    ways = groupings(8, 2, 4, 4)
    starts = [kept(graph(s), spectral_groups(graph(s), 2, 4, 4, 0)) for s in range(20)]
    assert any(start < 0.99 * max(kept(graph(s), way) for way in ways) for s, start in enumerate(starts))


def test_planted_groups_are_found_by_the_spectrum_alone() -> None:
    truth = np.random.default_rng(3).permutation(np.arange(16) % 4)
    weight = np.where(truth[:, None] == truth[None], 10.0, 1.0)
    np.fill_diagonal(weight, 0.0)
    found = spectral_groups(weight, 4, 3, 5, 0)
    assert len({(int(a), int(b)) for a, b in zip(truth, found, strict=True)}) == 4


@pytest.mark.parametrize(("experts", "groups", "slack", "room"), [(16, 4, 0.3, 5), (9, 4, 0.15, 3), (7, 7, 0.9, 2)])
def test_bounds_hold_all_and_leave_no_group_empty(experts: int, groups: int, slack: float, room: int) -> None:
    fewest, most = size_bounds(experts, groups, slack, room)
    assert fewest * groups <= experts <= most * groups and most <= room and fewest >= 1
    scores = np.zeros((experts, groups), dtype=np.int64)
    scores[:, 0] = 1 << 24  # everybody wants the first group
    sizes = np.bincount(bounded(scores, fewest, most), minlength=groups)
    assert sizes[0] == most and sizes.min() >= fewest


def test_copies_go_from_the_heaviest_rank_to_the_least_loaded_with_room() -> None:
    holds = np.eye(4, dtype=bool)[[0, 0, 1, 1, 2, 3]]  # experts 0 and 1 on rank 0, 2 and 3 on rank 1
    copy_hot(holds, np.array([40, 10, 10, 10, 5, 5]), 2)
    assert holds[0].tolist() == [True, False, True, True]  # rank 0 bears 50 of a mean 20: two copies; rank 1 is full
    assert holds[1:].sum() == 5


@pytest.mark.parametrize("slots", [8, 12, 16])
def test_keeps_more_pairs_together_than_random(slots: int) -> None:
    placed = Grace().place(problem(TRACE, 4, slots, seed=1))
    assert placed.physical_to_logical_LP.min() >= 0
    given = problem(TRACE, 4, seed=1)
    together = total = 0.0
    for layer, mask_EG in enumerate(Random().place(given).rank_mask_LEG):
        weight = given.profile.coactivation_EE(layer).astype(float)
        together += kept(weight, mask_EG.argmax(axis=1))
        total += (weight.sum() - np.trace(weight)) / 2
    assert placed.notes["kept_share"] > together / total


def test_nodes_are_grouped_first() -> None:
    placed = Grace().place(problem(TRACE, 4, 12, cluster=cluster(2, 2)))
    assert placed.physical_to_logical_LP.min() >= 0
    given = problem(TRACE, 4, 8, cluster=cluster(2, 2))
    mask = Grace().place(given).rank_mask_LEG
    chance = Random().place(given).rank_mask_LEG
    for layer in range(3):
        weight = given.profile.coactivation_EE(layer).astype(float)
        assert kept(weight, mask[layer].argmax(1) // 2) >= kept(weight, chance[layer].argmax(1) // 2)


def test_bad_parameters() -> None:
    with pytest.raises(UserError, match=r"placement\.size_slack=1\.5"):
        Grace(size_slack=1.5)
    with pytest.raises(UserError, match=r"placement\.kicks=-1"):
        Grace(kicks=-1)
