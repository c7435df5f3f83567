"""Token schedulers beyond the basic ones: the paper's rule, the greedy one, the oracle."""

from __future__ import annotations

import numpy as np

from semmoe.predict.oracle import Oracle
from semmoe.schedule.base import capacity_of
from semmoe.schedule.confident_first import ConfidentFirst
from semmoe.schedule.semantic import Semantic
from semmoe.schedule.sort_cut import SortCut
from semmoe.trace import RoutingTrace


def summed(score: np.ndarray, owner: np.ndarray) -> int:
    return int(score[np.arange(len(score)), owner].sum())


def test_sort_and_cut_by_hand() -> None:
    wish = np.array([1, 0, 0, 0, 1])  # sorted: 1 2 3 | 0 4, chunks of 3 and 2
    score = np.eye(2, dtype=np.int32)[wish]
    assert SortCut().homes(score, 3).owner_T.tolist() == [1, 0, 0, 0, 1]
    skewed = np.eye(2, dtype=np.int32)[np.array([1, 1, 1, 0])]
    assert SortCut().homes(skewed, 2).owner_T.tolist() == [0, 1, 1, 0]  # token 0 slides to a rank it did not ask for


def test_confident_tokens_choose_first() -> None:
    score = np.array([[9, 1], [8, 7], [5, 0]], dtype=np.int32)
    assert ConfidentFirst().homes(score, 2).owner_T.tolist() == [0, 1, 0]


def test_exact_beats_greedy_beats_sort_and_cut() -> None:
    rng = np.random.default_rng(0)
    for ranks in (4, 8):
        score = ((rng.gumbel(size=(512, ranks)) + np.linspace(0, 2, ranks)) * 1000).astype(np.int32)
        capacity = capacity_of(512, ranks, 1.0)
        plans = [s.homes(score, capacity) for s in (Semantic(), ConfidentFirst(), SortCut())]
        exact, greedy, cut = (summed(score, plan.owner_T) for plan in plans)
        assert exact > greedy > cut
        assert all(plan.counts_G.max() <= capacity for plan in plans)


def test_the_oracle_gives_the_true_experts(trace: RoutingTrace) -> None:
    q_TE = Oracle.of(trace).experts(trace.token_id_T, 1, trace.experts_TLk[:, 1][:, None])
    assert np.array_equal(np.sort(np.argsort(-q_TE, axis=1)[:, :2], axis=1), np.sort(trace.experts_TLk[:, 1], axis=1))
