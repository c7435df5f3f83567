"""Fewest rank changes between layers, against dynamic programming over all placements of every layer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_problems import cluster, problem

from semmoe.errors import UserError
from semmoe.placement import exflow
from semmoe.placement.enumeration import placements
from semmoe.placement.exflow import ExFlow, group_flow, stays
from semmoe.placement.random import Random
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=6, prompt_len=30, output_len=0, num_experts=8, top_k=2, layers=4, groups=4, topics=4).make()


def optimum(flow_LEE: np.ndarray, groups: int) -> int:
    """Most transitions that stay: the layers form a chain, so the best way to reach each placement suffices."""
    experts = flow_LEE.shape[1]
    ways = placements(experts, groups, True)
    hot = (ways[:, :, None] == np.arange(groups)).astype(np.float32).reshape(len(ways), -1)
    best_W = np.zeros(len(ways))
    for flow_EE in flow_LEE:
        push = np.einsum("wef,ed->wdf", hot.reshape(len(ways), experts, groups), flow_EE.astype(np.float32))
        best_W = (best_W[:, None] + push.reshape(len(ways), -1) @ hot.T).max(axis=0)
    return round(float(best_W.max()))


def flows(seed: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.gamma(0.4, 30.0, (3, experts, experts)))


@pytest.mark.parametrize(("experts", "groups"), [(8, 2), (6, 3)])
def test_few_partitions_are_solved_to_the_optimum(experts: int, groups: int) -> None:
    for seed in range(10):
        group_LE = ExFlow()._least_changes(flows(seed, experts), groups, np.random.default_rng(0), np.inf)
        assert all((np.bincount(row) == experts // groups).all() for row in group_LE)
        assert stays(flows(seed, experts), group_LE) == optimum(flows(seed, experts), groups)


@pytest.mark.parametrize(("experts", "groups"), [(8, 2), (6, 3), (9, 3)])
def test_the_search_alone_is_within_a_percent_on_20_cases(
    experts: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exflow, "FEW_PARTITIONS", 0)
    for seed in range(20):
        group_LE = ExFlow()._least_changes(flows(seed, experts), groups, np.random.default_rng(seed), np.inf)
        assert stays(flows(seed, experts), group_LE) >= 0.99 * optimum(flows(seed, experts), groups)


def test_one_undisturbed_start_is_not_enough_so_the_test_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exflow, "FEW_PARTITIONS", 0)
    lazy, worse = ExFlow(starts=1, kicks=0), 0
    for seed in range(20):
        group_LE = lazy._least_changes(flows(seed, 6), 3, np.random.default_rng(seed), np.inf)
        worse += stays(flows(seed, 6), group_LE) < 0.99 * optimum(flows(seed, 6), 3)
    assert worse > 0


def test_stays_and_group_flow_by_hand() -> None:
    flow = np.array([[[1, 2], [3, 4]]])
    assert stays(flow, np.array([[0, 1], [1, 0]])) == 5
    assert group_flow(flow[0], np.array([0, 1]), np.array([1, 0]), 2).tolist() == [[2, 1], [4, 3]]


def test_a_planted_chain_is_found() -> None:
    rng = np.random.default_rng(0)
    ways = [rng.permutation(np.arange(8) % 4) for _ in range(5)]
    flow = np.stack([(a[:, None] == b[None, :]) * 7 for a, b in itertools.pairwise(ways)])
    assert stays(flow, ExFlow()._least_changes(flow, 4, rng, np.inf)) == flow.sum()


def test_beats_chance_and_nodes_come_first() -> None:
    one = problem(TRACE, 4, seed=2)
    placed = ExFlow().place(one)
    flow = np.stack([one.profile.transitions_EE(i) for i in range(1, 4)])

    def stay(placement, ranks_a_group: int = 1) -> int:
        return int(stays(flow, placement.first_slot_LE // placement.slots_per_rank // ranks_a_group))

    assert stay(placed) > stay(Random().place(one))
    assert placed.notes["stay_share"] == pytest.approx(stay(placed) / flow.sum())
    two = ExFlow().place(problem(TRACE, 4, seed=2, cluster=cluster(2, 2)))
    assert stay(two, 2) >= stay(placed, 2) * 0.999
    assert two.notes["node_stay_share"] == pytest.approx(stay(two, 2) / flow.sum())


def test_one_layer_uneven_counts_and_bad_parameters() -> None:
    single = Synthetic(requests=2, prompt_len=8, output_len=0, num_experts=8, top_k=2, layers=1, groups=4).make()
    assert ExFlow().place(problem(single, 4)).num_layers == 1
    assert ExFlow().place(problem(TRACE, 3, slots=9)).slots_per_rank == 3
    with pytest.raises(UserError, match=r"placement\.starts=0"):
        ExFlow(starts=0)
