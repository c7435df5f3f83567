"""Sem-MoE's Algorithm 1 against enumeration of its own objective."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from placement_problems import problem

from semmoe.errors import UserError
from semmoe.placement.enumeration import placements
from semmoe.placement.sem_moe import Affinities, SemMoe, token_labels
from semmoe.profile import Profile
from semmoe.sources.synthetic import Synthetic


def affinities(seed: int) -> Affinities:
    made = Synthetic(requests=6, prompt_len=20, length_spread=0.3, output_len=0, num_experts=6, top_k=2, layers=1,
                     groups=3, topics=3, seed=seed)  # fmt: skip
    return Affinities.of(Profile.fit(made.make()), 6)


def optimum(tables: Affinities, ranks: int) -> float:
    mass_RE, requests = tables.mass_LRE[0], len(tables.length_R)
    homes = np.array([h for h in itertools.product(range(ranks), repeat=requests)
                      if np.bincount(h, minlength=ranks).max() <= -(-requests // ranks)])  # fmt: skip
    load = np.stack([(homes == g) @ tables.length_R for g in range(ranks)], axis=1) / tables.length_R.sum()
    uneven, best = np.abs(load - 1 / ranks).sum(axis=1), np.inf
    for way in placements(6, ranks, False):
        score = mass_RE @ (way[:, None] == np.arange(ranks)).astype(float)
        local = score[np.arange(requests), homes].sum(axis=1) / mass_RE.sum()
        best = min(best, float((0.5 * uneven + 0.5 * (1 - local)).min()))
    return best


def test_within_a_percent_of_its_own_optimum_on_20_cases_and_the_greedy_steps_alone_are_not() -> None:
    worse = 0
    for seed in range(20):
        tables = affinities(seed)
        best = optimum(tables, 3)
        assert best - 1e-9 <= SemMoe().solve(tables, slice(0, 1), 3, 0)[0] <= 1.01 * best
        worse += SemMoe(polish=False).solve(tables, slice(0, 1), 3, 0)[0] > 1.01 * best
    assert worse > 0


@pytest.mark.parametrize("home", ["token", "request"])
def test_policy_fills_slots_reproduces_and_labels_every_type(home: str) -> None:
    trace = Synthetic(requests=6, prompt_len=20, output_len=0, num_experts=8, top_k=2, layers=2, groups=4).make()
    for ranks, slots in ((4, 8), (4, 12), (3, 9)):
        one, two = (SemMoe().place(problem(trace, ranks, slots, home=home)) for _ in range(2))
        assert np.array_equal(one.physical_to_logical_LP, two.physical_to_logical_LP)
        labels = one.notes["token_rank_LU"]
        assert labels.shape == (2, len(np.unique(trace.token_id_T))) and labels.max() < ranks
        assert one.notes["token_confidence_LU"].min() >= 1 / ranks
        if home == "request":
            assert np.array_equal(labels[0], labels[1])


def test_labels_by_hand_and_bad_parameters() -> None:
    occurrences = np.array([[2.0, 0, 1], [1, 1, 1], [0, 3, 0]])
    label, share = token_labels(occurrences, np.array([0, 1, 1]), 2)
    assert label.tolist() == [0, 1, 0] and share.tolist() == [2 / 3, 1.0, 0.5]
    with pytest.raises(UserError, match=r"placement\.theta=2"):
        SemMoe(theta=2)
