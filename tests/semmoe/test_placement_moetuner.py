"""Both programs of MoETuner against enumeration; gaps that are honest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_problems import cluster, problem

from semmoe.errors import UserError
from semmoe.placement.enumeration import placements
from semmoe.placement.layer_tail import bottleneck, least_tail, tail_cost
from semmoe.placement.load_balanced import SPREAD, cost
from semmoe.placement.moetuner import MoETuner, balanced_clusters, relative_slowness
from semmoe.placement.random import Random
from semmoe.sources.synthetic import Synthetic

TRACE = Synthetic(requests=6, prompt_len=30, output_len=0, num_experts=8, top_k=2, layers=3, groups=4, topics=4).make()


@pytest.mark.parametrize(("experts", "ranks"), [(8, 4), (9, 3)])
def test_clusters_equal_the_enumerated_optimum_and_prove_it(experts: int, ranks: int) -> None:
    ways = placements(experts, ranks, False)
    for seed in range(10):
        load = np.round(np.random.default_rng(seed).lognormal(3, 0.8, experts))
        best = min(cost(load, way.astype(np.int64), ranks, SPREAD) for way in ways)
        found, value, bound = balanced_clusters(load, ranks, 0.0, 32, 20.0)
        assert (np.bincount(found) == experts // ranks).all()
        assert value == pytest.approx(best) and value == pytest.approx(cost(load, found, ranks, SPREAD))
        assert bound == pytest.approx(best, rel=1e-4, abs=1e-6)


def test_the_program_repairs_what_exchanges_leave() -> None:
    load = np.round(np.random.default_rng(3).lognormal(3, 0.8, 9))
    best = min(cost(load, way.astype(np.int64), 3, SPREAD) for way in placements(9, 3, False))
    lazy = [balanced_clusters(load, 3, 0.0, 0, limit, seed)[1] for limit in (-1.0, 20.0) for seed in (0,)]
    assert lazy[1] == pytest.approx(best) and lazy[0] >= lazy[1]


@pytest.mark.parametrize(
    "load", [[13, 10, 4, 6, 1, 7, 8, 11, 4], [1081, 287, 1047, 1237, 519, 184, 64, 42, 55], [0, 0, 0, 0, 0, 0]]
)
def test_programs_on_which_highs_stumbles_are_proved_too(load: list[int]) -> None:
    _, value, bound = balanced_clusters(np.array(load, dtype=float), 3, 0.0, 32, 20.0)
    assert bound == pytest.approx(value)


def test_a_short_time_limit_reports_a_gap() -> None:
    load = np.random.default_rng(0).lognormal(3, 1.0, 64)
    _, value, bound = balanced_clusters(load, 8, 0.0, 1, 0.2)
    assert 0 <= bound <= value


def test_bottleneck_by_enumeration() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs, remote = rng.integers(0, 20, (5, 5)).astype(float), rng.integers(0, 50, (5, 5)).astype(float)
        order = np.arange(5)
        want = min(
            (costs[order, list(p)].max(), remote[order, list(p)].sum()) for p in itertools.permutations(range(5))
        )
        found = bottleneck(costs, remote)
        assert (costs[order, found].max(), remote[order, found].sum()) == want


def brute_tail(flows: list[np.ndarray], slow: np.ndarray) -> float:
    orders = [np.array(p) for p in itertools.permutations(range(len(slow)))]
    best = {0: 0.0}
    reach = np.zeros(len(orders))
    for flow in flows:
        step = np.array([[tail_cost(flow, a, b, slow) for b in orders] for a in orders])
        reach = (reach[:, None] + step).min(axis=0)
    return float(min(reach.min(), np.inf)) + best[0]


@pytest.mark.parametrize("seed", range(6))
def test_tail_equals_the_optimum_on_one_node(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flows = [rng.poisson(rng.gamma(0.5, 30.0, (4, 4))).astype(float) for _ in range(3)]
    slow = 1.0 - np.eye(4)
    _, tail, bound = least_tail(flows, slow, np.inf)
    assert tail == bound == pytest.approx(brute_tail(flows, slow))


def test_tail_over_two_nodes_is_near_the_optimum_and_its_bound_holds() -> None:
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        flows = [rng.poisson(rng.gamma(0.5, 30.0, (4, 4))).astype(float) for _ in range(3)]
        slow = np.where(np.arange(4)[:, None] // 2 == np.arange(4)[None] // 2, 1.0, 8.0) * (1 - np.eye(4))
        _, tail, bound = least_tail(flows, slow, np.inf)
        best = brute_tail(flows, slow)
        assert bound <= best <= tail + 1e-9
        ratios.append(tail / best)
    assert np.mean(ratios) <= 1.01


def test_the_whole_policy_beats_chance_on_both_objectives() -> None:
    given = problem(TRACE, 4, seed=4)
    placed, chance = MoETuner().place(given), Random().place(given)

    def imbalance(placement) -> float:
        load_LG = np.einsum("le,leg->lg", given.profile.load_LE, placement.rank_mask_LEG)
        return float(np.abs(load_LG - load_LG.mean(axis=1, keepdims=True)).sum())

    assert imbalance(placed) < imbalance(chance)
    assert placed.notes["imbalance_share"] == pytest.approx(imbalance(placed) / given.profile.load_LE.sum())
    assert placed.notes["tail_gap"] == 0.0
    assert relative_slowness(problem(TRACE, 4, cluster=cluster(2, 2)))[0].tolist() == [0, 1, 8, 8]


def test_uneven_counts_and_bad_parameters() -> None:
    assert MoETuner().place(problem(TRACE, 3, slots=9)).slots_per_rank == 3
    with pytest.raises(UserError, match=r"placement\.tolerance=-1"):
        MoETuner(tolerance=-1)
