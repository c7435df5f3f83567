"""Contiguous, strided, random and EPLB placements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_problems import cluster, problem

from semmoe.errors import UserError
from semmoe.placement.contiguous import Contiguous
from semmoe.placement.eplb import Eplb, rebalance
from semmoe.placement.random import Random
from semmoe.placement.semantic import Semantic
from semmoe.placement.strided import Strided
from semmoe.sources.synthetic import Synthetic

GOLDEN = Path("../shared/data/eplb_golden.npz")
TRACE = Synthetic(requests=6, prompt_len=20, output_len=0, num_experts=8, top_k=2, layers=2, groups=4, topics=4).make()


def copies_on_one_rank(table_LP: np.ndarray, ranks: int) -> int:
    """How many ranks (over layers) hold two copies of one expert."""
    return sum(len(np.unique(held)) < len(held) for row in table_LP for held in row.reshape(ranks, -1))


def test_contiguous_and_strided_by_hand() -> None:
    assert Contiguous().place(problem(TRACE, 4)).physical_to_logical_LP[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert Strided().place(problem(TRACE, 4)).physical_to_logical_LP[1].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert Contiguous().place(problem(TRACE, 4, 12)).physical_to_logical_LP[0, 8:].tolist() == [0, 1, 2, 3]
    assert Strided().place(problem(TRACE, 4, 12)).physical_to_logical_LP[0, :3].tolist() == [0, 4, 0]


@pytest.mark.parametrize("policy", [Contiguous(), Strided(), Random(), Eplb(), Semantic(restarts=2)])
@pytest.mark.parametrize("slots", [8, 12])
@pytest.mark.parametrize("home", ["token", "request"])
def test_every_policy_fills_every_slot_and_depends_on_the_seed_alone(policy: object, slots: int, home: str) -> None:
    first = policy.place(problem(TRACE, 4, slots, home=home, seed=5))  # type: ignore[attr-defined]
    again = policy.place(problem(TRACE, 4, slots, home=home, seed=5))  # type: ignore[attr-defined]
    assert first.physical_to_logical_LP.shape == (2, slots)
    assert first.physical_to_logical_LP.min() >= 0
    assert np.array_equal(first.physical_to_logical_LP, again.physical_to_logical_LP)
    assert first.layer_ids == (0, 1)


def test_random_differs_between_layers_and_seeds() -> None:
    one, two = (Random().place(problem(TRACE, 4, seed=s)).physical_to_logical_LP for s in (0, 1))
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one, two)


@pytest.mark.skipif(not GOLDEN.is_file(), reason="the golden cases lie outside the repository")
def test_eplb_equals_the_published_algorithm_on_all_golden_cases() -> None:
    with np.load(GOLDEN) as golden:
        names = sorted({key.rsplit("/", 1)[0] for key in golden.files})
        assert len(names) >= 9
        for name in names:
            slots, groups, nodes, ranks = (int(v) for v in golden[f"{name}/params"])
            weight = golden[f"{name}/weight"]
            table = rebalance(weight, slots, groups, nodes, ranks)
            assert np.array_equal(table, golden[f"{name}/phy2log"]), name
            counts = [np.bincount(row, minlength=weight.shape[1]) for row in table]
            assert np.array_equal(counts, golden[f"{name}/logcnt"]), name


def test_eplb_readme_example() -> None:
    """The example of the published README (2 layers x 12 experts, 16 slots, 4 groups, 2 nodes, 8 ranks)."""
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    assert rebalance(load, 16, 4, 2, 8).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(16, 4, 24), (16, 8, 32), (12, 4, 16), (8, 4, 20), (8, 8, 64)]))
def test_distinct_ranks_never_doubles_and_stays_balanced(seed: int, shape: tuple[int, int, int]) -> None:
    experts, ranks, slots = shape
    load = np.random.default_rng(seed).lognormal(0, 1.5, (3, experts))
    plain, apart = (rebalance(load, slots, 1, 1, ranks, flag) for flag in (False, True))
    assert copies_on_one_rank(apart, ranks) == 0
    for row, other in zip(apart, plain, strict=True):
        assert set(row) == set(other) == set(range(experts))
        assert np.bincount(row).max() <= ranks


def test_published_eplb_does_double_so_the_check_above_can_fail() -> None:
    load = np.random.default_rng(0).lognormal(0, 1.5, (10, 16))
    assert copies_on_one_rank(rebalance(load, 32, 1, 1, 8), 8) > 0


def test_eplb_balances_the_load() -> None:
    load = np.random.default_rng(1).lognormal(0, 1, (4, 64))

    def imbalance(table: np.ndarray) -> float:
        shares = [
            (w[row] / np.bincount(row, minlength=64)[row]).reshape(8, -1).sum(1)
            for row, w in zip(table, load, strict=True)
        ]
        return float(np.mean([s.max() / s.mean() for s in shares]))

    contiguous = np.tile(np.arange(64), (4, 1))
    assert imbalance(rebalance(load, 72, 1, 1, 8)) < 1.05 < imbalance(contiguous)


def test_eplb_takes_nodes_from_the_cluster_and_groups_from_the_model() -> None:
    two = cluster(2, 2)
    grouped = Eplb().place(problem(TRACE, 4, n_group=2, cluster=two))
    for row in grouped.physical_to_logical_LP:  # experts 0..3 and 4..7 are the groups: each stays inside a node
        assert {tuple(sorted(row[:4])), tuple(sorted(row[4:]))} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    with pytest.raises(UserError, match="1 expert groups cannot be split over 2 nodes"):
        Eplb(hierarchical="always").place(problem(TRACE, 4, cluster=two))


def test_bad_parameters_are_named() -> None:
    with pytest.raises(UserError, match=r"placement\.hierarchical='x'"):
        Eplb(hierarchical="x")
    with pytest.raises(UserError, match="cannot all be distinct"):
        rebalance(np.ones((1, 4)), 12, 1, 1, 2, True)
    with pytest.raises(UserError, match=r"placement\.restarts=0 must be at least 1"):
        Semantic(restarts=0)
    with pytest.raises(UserError, match=r"placement\.load_target=0\.9"):
        Semantic(load_target=0.9)
