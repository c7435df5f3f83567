"""The co-clustering start."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from semmoe.placement.cocluster import covariance_EE
from semmoe.placement.partition import improve


def within(similarity_EE: np.ndarray, rank_E: np.ndarray) -> float:
    same = rank_E[:, None] == rank_E
    np.fill_diagonal(same, False)
    return float(similarity_EE[same].sum())


def test_no_trade_is_left_and_the_quota_holds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        half = rng.normal(size=(12, 12))
        similarity_EE = half + half.T
        rank_E = rng.permutation(np.arange(12) % 3)
        before = within(similarity_EE, rank_E)
        improve(similarity_EE, rank_E, 3, 0)
        after = within(similarity_EE, rank_E)
        assert after > before
        assert (np.bincount(rank_E) == 4).all()
        for a, b in combinations(range(12), 2):
            trial = rank_E.copy()
            trial[a], trial[b] = trial[b], trial[a]
            assert within(similarity_EE, trial) <= after + 1e-6


def test_blocks_that_move_together_are_found() -> None:
    rng = np.random.default_rng(1)
    block_E = rng.permutation(np.arange(16) % 4)
    share_SE = rng.random((500, 4))[:, block_E] + 0.2 * rng.random((500, 16))
    rank_E = rng.permutation(np.arange(16) % 4)
    improve(covariance_EE(share_SE, 16), rank_E, 4, 0)
    assert ((rank_E[:, None] == rank_E) == (block_E[:, None] == block_E)).all()
