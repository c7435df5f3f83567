"""Token table: the smoothing formula, fixed-point scores, unseen tokens, request scores."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.predict.base import FIXED_POINT, ExpertPredictor
from semmoe.predict.compact import CompactRows
from semmoe.predict.evaluate import accuracy
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.sources.synthetic import Synthetic
from semmoe.trace import RoutingTrace


def trace_of(token_ids: list[int], experts: list[list[int]]) -> RoutingTrace:
    return RoutingTrace(
        model="m",
        num_experts=4,
        vocab_size=10,
        experts_TLk=np.array(experts)[:, None],
        token_id_T=np.array(token_ids),
        request_offset_R1=np.array([0, len(token_ids)]),
        prompt_len_R=np.array([len(token_ids)]),
        domain_R=np.array(["d"]),
        layer_ids_L=np.array([0]),
    )


def fitted(trace: RoutingTrace, kappa: float = 2.0, entries: int | None = None) -> TokenTable:
    table = TokenTable(kappa, entries=entries)
    table.fit(Profile.fit(trace))
    return table


SMALL = trace_of([7, 7, 7, 2], [[0, 1], [0, 1], [0, 2], [3, 2]])  # loads 3, 2, 2, 1 of 8
PAIRS = Placement.from_ranks(np.array([[0, 0, 1, 1]]), 2, (0,))
REAL = Synthetic(
    requests=10, prompt_len=40, output_len=5, num_experts=16, top_k=3, layers=3, groups=4, topics=4, vocab_size=100
).make()


def test_smoothed_rows_by_hand() -> None:
    row_E = fitted(SMALL).experts(np.array([7]), 0, None)[0]
    prior = np.array([3, 2, 2, 1]) / 8
    np.testing.assert_allclose(row_E, (np.array([3, 2, 1, 0]) / 2 + 2 * prior) / (3 + 2), atol=1 / 510)


def test_an_unseen_token_gets_the_marginal() -> None:
    table = fitted(SMALL)
    np.testing.assert_allclose(table.experts(np.array([9]), 0, None)[0], np.array([3, 2, 2, 1]) / 8, rtol=1e-6)
    score_TG, best_T = table.scores(np.array([9]), 0, None, PAIRS)
    assert score_TG.tolist() == [[2 * FIXED_POINT * 5 // 8, 2 * FIXED_POINT * 3 // 8]]
    assert best_T.tolist() == [0.625]


def test_gathered_scores_equal_those_of_the_expert_rows() -> None:
    table = fitted(REAL, entries=16)  # all of them
    for slots in (16, 24):
        rows = [np.random.default_rng(i).permutation(np.arange(slots) % 16) for i in range(3)]
        placement = Placement(np.array(rows, dtype=np.int32), 4, (0, 1, 2), 16)
        tokens = np.arange(100)
        for layer in range(3):
            fast, best = table.scores(tokens, layer, None, placement)
            slow, confidence = ExpertPredictor.scores(table, tokens, layer, None, placement)
            assert fast.dtype == np.int32
            assert np.abs(fast - slow).max() <= 3 * FIXED_POINT // 100  # rows keep chances in steps of 1/255
            np.testing.assert_allclose(best, confidence, atol=0.01)


def test_a_new_placement_gets_new_tables() -> None:
    table = fitted(SMALL)
    other = Placement.from_ranks(np.array([[1, 1, 0, 0]]), 2, (0,))
    first = table.scores(np.array([7]), 0, None, PAIRS)[0]
    assert np.array_equal(table.scores(np.array([7]), 0, None, other)[0], first[:, ::-1])
    assert np.array_equal(table.scores(np.array([7]), 0, None, PAIRS)[0], first)


def test_a_new_fit_forgets_the_old_one() -> None:
    table = fitted(SMALL)
    before = table.scores(np.array([7]), 0, None, PAIRS)[0]
    table.experts(np.array([7]), 0, None)
    table.fit(Profile.fit(trace_of([7], [[2, 3]])))
    assert not np.array_equal(table.scores(np.array([7]), 0, None, PAIRS)[0], before)
    assert table.experts(np.array([7]), 0, None)[0] == pytest.approx([0, 0, 0.5, 0.5], abs=1 / 510)


def test_request_scores_are_summed_over_tokens_and_layers() -> None:
    table = fitted(REAL)
    placement = Placement.from_ranks(np.tile(np.arange(16) % 4, (3, 1)), 4, (0, 1, 2))
    tokens = np.array([3, 3, 99, 40])
    whole = table.request_scores(tokens, placement)
    layers = sum(table.scores(tokens, i, None, placement)[0].sum(axis=0, dtype=np.int64) for i in range(3))
    assert whole.dtype == np.int64
    assert np.array_equal(whole, layers)


def test_table_bytes_count_the_index_and_the_scores() -> None:
    table = fitted(SMALL)
    assert table.table_bytes == 10 * 4
    table.scores(np.array([7]), 0, None, PAIRS)
    assert table.table_bytes == 10 * 4 + 3 * 2 * 2


def test_bad_input_is_explained() -> None:
    with pytest.raises(UserError, match=r"predictor\.kappa=0"):
        TokenTable(0)
    with pytest.raises(UserError, match="token id 10 outside the vocabulary of 10"):
        fitted(SMALL).scores(np.array([10]), 0, None, PAIRS)


def test_compact_rows_keep_the_largest_entries_and_give_the_rest_to_the_marginal() -> None:
    counts, tokens, prior = np.array([[6, 4, 0, 2, 0, 0]]), np.array([6]), np.array([4, 3, 2, 1, 1, 1]) / 12
    exact = (counts[0] / 2 + 2 * prior) / (6 + 2)
    for kept in (1, 2, 6, 99):
        rows = CompactRows.of(counts, tokens, 2, 2.0, kept, prior)
        share, marginal = rows.rows(np.array([0, 1]))
        best = np.argsort(-exact, kind="stable")[: min(kept, 6)]
        np.testing.assert_allclose(share[best], exact[best], atol=1 / 255)
        others = np.setdiff1d(np.arange(6), best)
        if len(others):
            np.testing.assert_allclose(
                share[others] / share[others].sum(), prior[others] / prior[others].sum(), rtol=1e-5
            )
        assert share.sum() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(marginal, prior, rtol=1e-6)
        assert rows.nbytes == 2 * min(kept, 6) + 6 * 4


def test_twice_top_k_entries_lose_next_to_no_recall() -> None:
    train, test = REAL.split(0.5, 0)
    recall = []
    for entries in (16, None, 3):  # everything, 2 k = 6, k = 3 of 16 experts
        table = TokenTable(entries=entries)
        table.fit(Profile.fit(train))
        recall.append(accuracy(table, test).recall_L.mean())
    assert abs(recall[1] - recall[0]) < 0.005
    assert abs(recall[2] - recall[0]) < 0.03
    with pytest.raises(UserError, match=r"predictor\.entries=0"):
        TokenTable(entries=0)
