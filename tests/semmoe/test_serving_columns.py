"""Serving columns: one definition for both backends, held to a case worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.serving import Request
from semmoe.serving.columns import served_columns

SLO = {"ttft_ms": 1000.0, "tpot_ms": 100.0}
REQUESTS = [Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 5)]


def test_serving_columns_by_hand():
    row = served_columns(
        REQUESTS, np.array([100.0, 2000.0]), np.array([300.0, 2400.0]), 1, SLO, np.array([50.0, 150.0])
    )
    assert row["ttft_ms"] == 1050.0 and row["e2e_ms"] == 1350.0 and row["itl_ms"] == 100.0
    assert row["tpot_ms"] == pytest.approx((200 / 2 + 400 / 4) / 2)
    assert row["throughput_rps"] == pytest.approx(2 / 2.4) and row["preemptions"] == 1
    assert row["goodput_rps"] == pytest.approx(1 / 2.4), "the second missed the limit of 1000 ms"


def test_a_limit_on_tpot_counts_too_and_one_token_has_none():
    strict = served_columns(REQUESTS, np.array([100.0, 200.0]), np.array([300.0, 600.0]), 0, SLO | {"tpot_ms": 99.0})
    assert strict["goodput_rps"] == 0
    one = served_columns([Request(0, 0.0, 10, 1)], np.array([100.0]), np.array([100.0]), 0, SLO)
    assert "tpot_ms" not in one and one["goodput_rps"] == pytest.approx(10.0)


def test_requests_that_never_finished_count_for_no_rate():
    nothing = np.array([np.nan, np.nan])
    row = served_columns(REQUESTS, nothing, nothing, 0, SLO)
    assert "throughput_rps" not in row and "ttft_ms" not in row
