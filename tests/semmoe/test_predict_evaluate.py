"""Figures of predictors: recall and calibration by hand, held-out against the in-sample counting of types."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.predict.evaluate import accuracy, calibration_error, paper_f1_L, recall_of
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.trace import RoutingTrace


def test_recall_by_hand() -> None:
    q = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    hit = np.array([[True, False, True], [False, True, True]])
    assert recall_of(q, hit, 2) == 0.75


def test_calibration_error_by_hand() -> None:
    assert calibration_error(np.full((1, 4), 0.8), np.array([[True, True, False, False]])) == pytest.approx(0.3)
    fair = np.random.default_rng(0).random((4000, 8))
    drawn = np.random.default_rng(1).random((4000, 8)) < fair
    assert calibration_error(fair, drawn) < 0.02 < calibration_error(fair**3, drawn)


def test_counting_types_in_sample_flatters_the_table(trace: RoutingTrace) -> None:
    train, test = trace.select(np.arange(6)), trace.select(np.arange(6, 12))
    table = TokenTable()
    table.fit(Profile.fit(train))
    heldout = accuracy(table, test)
    assert (paper_f1_L(trace) > heldout.recall_L + 0.03).all()
    assert heldout.recall_L.shape == heldout.calibration_L.shape == (3,)


def test_the_papers_figure_of_types_seen_once_is_perfect(trace: RoutingTrace) -> None:
    once = trace.select(np.array([0]))
    _, first = np.unique(once.token_id_T, return_index=True)
    unique = RoutingTrace(
        model="toy",
        num_experts=8,
        vocab_size=50,
        experts_TLk=once.experts_TLk[first],
        token_id_T=once.token_id_T[first],
        request_offset_R1=np.array([0, len(first)]),
        prompt_len_R=np.array([1]),
        domain_R=np.array(["d"]),
        layer_ids_L=once.layer_ids_L,
    )
    assert paper_f1_L(unique).tolist() == [1.0, 1.0, 1.0]
