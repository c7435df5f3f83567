"""The page of shuffle, exchange and token ranking: real ranks once, refusals, what the table says; no timing is asserted."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from harness.bench.ranking import VARIANTS, ranking_rows  # noqa: E402
from harness.bench.shuffle import document, shuffle_rows  # noqa: E402
from harness.environment import environment  # noqa: E402

ABOUT = environment(4) | {"commit": "abc"}


def wrong_ranking(owner_T, ranks):
    """The right one with two tokens exchanged."""
    right = VARIANTS["sort_pipeline"](owner_T, ranks)
    perm_T = right.perm_T.clone()
    perm_T[:2] = perm_T[:2].flip(0)
    return dataclasses.replace(right, perm_T=perm_T)


def test_token_ranking_has_percentiles_a_ratio_and_the_spread_of_repeats():
    rows = ranking_rows((64, 256), rounds=5, repeats=2)
    assert len(rows) == 2 * 2 * 2 and all(row["correct"] for row in rows)
    assert all(row["p10_us"] <= row["p50_us"] <= row["p90_us"] <= row["p99_us"] for row in rows)
    assert all(row["iterations"] == 5 for row in rows)
    ours, theirs = rows[:2]
    assert theirs["ours_speedup"] == pytest.approx(theirs["p50_us"] / ours["p50_us"]) and "p50_spread" in ours


def test_a_wrong_ranking_is_not_timed_and_gives_no_ratio():
    """Negative control."""
    rows = ranking_rows((64,), rounds=5, repeats=1, variants=VARIANTS | {"wrong": wrong_ranking})
    assert [row["correct"] for row in rows] == [True, True, False]
    assert not any("ours_speedup" in row or "p50_us" in row for row in rows)
    text = document(rows, ABOUT, "make shuffle")
    assert "| 64 | wrong | WRONG |" in text and "| 64 | one_pass | not timed |" in text


def test_real_ranks_give_every_case_with_the_slowest_rank_of_each_call():
    rows = shuffle_rows(tokens=(16,), rounds=2, repeats=1)
    assert {row["case"] for row in rows} == {"ranks_srs", "ranks_sag", "ranks_srs_sag", "ranks_exchange"}
    assert all(row["correct"] and row["ours_speedup"] > 0 for row in rows)
    text = document(rows, ABOUT, "make shuffle")
    assert "## srs_sag" in text and text.count("| 16 | ours |") == 4 and "follows from them" in text
