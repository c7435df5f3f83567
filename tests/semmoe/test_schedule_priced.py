"""Priced token scheduling: within its capacity, near the exact homes, and where pricing matters better than greedy."""

from __future__ import annotations

import numpy as np
import pytest
from home_scores import KINDS, scores

from semmoe.assign import assign_capped
from semmoe.errors import UserError
from semmoe.schedule.base import capacity_of
from semmoe.schedule.confident_first import greedy_owners
from semmoe.schedule.priced import Priced, chunk_capacity, chunk_tokens, priced_owners


def total(score_TG: np.ndarray, owner_T: np.ndarray) -> float:
    return float(score_TG[np.arange(len(owner_T)), owner_T].astype(np.int64).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [1.0, 1.1])
def test_homes_keep_the_capacity_and_come_near_the_exact_sum(kind: str, cap: float) -> None:
    for tokens, ranks in ((64, 8), (1024, 8), (2500, 8), (1024, 4), (500, 6)):
        score_TG, capacity = scores(kind, tokens, ranks), capacity_of(tokens, ranks, cap)
        plan = Priced().homes(score_TG, capacity)
        assert plan.counts_G.max() <= capacity and plan.counts_G.sum() == tokens
        exact = total(score_TG, assign_capped(score_TG, capacity))
        assert total(score_TG, plan.owner_T) >= 0.985 * exact, (tokens, ranks)


def test_where_one_rank_is_liked_by_all_prices_beat_the_greedy_pass() -> None:
    score_TG = scores("skewed", 1024, 8)
    assert total(score_TG, priced_owners(score_TG, 128)) > 1.05 * total(score_TG, greedy_owners(score_TG, 128))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 24, 64])
def test_shares_of_the_chunks_hold_their_tokens_and_sum_to_no_more_than_the_capacity(ranks: int) -> None:
    chunk = chunk_tokens(ranks)
    assert chunk % ranks == 0
    for tokens in (1, ranks, chunk - 1, chunk, chunk + 1, 3 * chunk + ranks + 1):
        for capacity in (-(-tokens // ranks), -(-tokens // ranks) + 7, tokens):
            cuts = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
            shares = [chunk_capacity(*cut, tokens, ranks, capacity) for cut in cuts]
            assert all(share * ranks >= end - start for share, (start, end) in zip(shares, cuts, strict=True))
            assert sum(shares) <= capacity


def test_least_margin_moves_first_and_no_tokens_are_no_work() -> None:
    assert priced_owners(np.array([[9, 0], [8, 0], [7, 0]], dtype=np.int32) * 1000, 2).tolist() == [0, 0, 1]
    assert len(priced_owners(np.zeros((0, 4), dtype=np.int32), 0)) == 0


def test_tokens_that_do_not_fit_and_scores_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="9 tokens on 2 ranks do not fit"):
        priced_owners(np.zeros((9, 2), dtype=np.int32), 4)
    with pytest.raises(UserError, match="2\\^24"):
        priced_owners(np.array([[0, 1 << 25]], dtype=np.int32), 1)
