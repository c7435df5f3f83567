"""The table of skewed exchanges: patterns, what is refused, the law found again, real ranks; no timing is asserted."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.bench import skew as skew_bench  # noqa: E402
from harness.bench.exchanges import DIALS, PATTERNS, ROW_BYTES, Exchange, exchanges, patterns_of  # noqa: E402
from harness.bench.skew_page import document, read_samples  # noqa: E402
from harness.calibration.skew import loads_of, skewed_us  # noqa: E402
from harness.pool import RankError, RankPool  # noqa: E402
from semmoe.errors import UserError  # noqa: E402

SIZES = (1 << 16, 1 << 18, 1 << 20)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_pattern_moves_the_same_total_and_the_dial_makes_it_more_unequal(ranks):
    for pattern in patterns_of(ranks):
        skews = []
        for dial in (0.0, *DIALS):
            rows_GG = Exchange(1 << 20, pattern, dial).rows_GG(ranks)
            assert (np.diag(rows_GG) == 0).all() and (rows_GG >= 0).all()
            assert abs(rows_GG.sum() * ROW_BYTES - (1 << 20)) <= ranks**2 * ROW_BYTES / 2
            mean, port, pair = loads_of(rows_GG)
            skews.append((port / mean, pair / mean))
        assert skews == sorted(skews) and skews[-1] > skews[0], pattern
    assert len({Exchange(1 << 20, p, 1.0).rows_GG(ranks).tobytes() for p in patterns_of(ranks)}) == len(
        patterns_of(ranks)
    )


def test_the_worked_example_and_how_far_each_pattern_goes():
    assert Exchange(600 * ROW_BYTES).rows_GG(3).tolist() == [[0, 100, 100], [100, 0, 100], [100, 100, 0]]
    assert Exchange(600 * ROW_BYTES, "hot_receiver", 1.0).rows_GG(3)[:, 0].tolist() == [0, 300, 300]
    assert Exchange(600 * ROW_BYTES, "hot_receiver", 0.5).rows_GG(3)[:, 0].tolist() == [0, 200, 200]
    ratio = {}
    for pattern in PATTERNS:
        mean, port, pair = loads_of(Exchange(1 << 20, pattern, 1.0).rows_GG(4))
        ratio[pattern] = round(port / mean, 2), round(pair / mean, 2)
    assert ratio == {"hot_receiver": (4, 1.33), "hot_sender": (4, 1.33), "permutation": (1, 1), "few_pairs": (2, 2)}


def planted(ranks: int, a: float, b: float) -> list[dict]:
    """Samples of a machine that keeps the law exactly: 100 us and a microsecond a row."""
    balanced_B2 = np.array([[0.0, 100.0], [1e6, 100.0 + 1e6]])
    lines = []
    for case in exchanges(SIZES, ranks):
        us = float(skewed_us(balanced_B2, np.array([loads_of(case.rows_GG(ranks))]), ranks, a, b)[0])
        lines.append({"ranks": ranks, **vars(case), "us": [us * 0.9, us, us, us * 1.2]})
    about = {"cores": 2, "cpu": "a CPU", "torch": "2", "commit": "abc", "load_1min": 0.1}
    lines[0]["environment"] = about
    return lines


def test_the_law_is_found_again_and_others_are_worse_on_cases_held_out():
    text = document(planted(4, a=0.7, b=0.4), "make skew")
    row = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")
    }
    found = row["mean + 0.70 (port - mean) + 0.40 max(3 pair - port, 0)"]
    assert float(found[2].strip("| ")) < 0.5
    for worse in ("mean: only the total counts", "busiest port", "busiest port or 3 x the largest pair"):
        assert float(row[worse][2]) > 5, worse
    assert "no link speed follows" in text and "make skew" in text


def test_of_two_ranks_only_the_port_is_fitted():
    text = document(planted(2, a=0.3, b=0.0), "make skew")
    assert "| mean + 0.30 (port - mean) |" in text and "permutation |" not in text


def test_samples_that_are_none_are_refused(tmp_path):
    for content in ("", "{}", "[1, 2]", '{"ranks": 2}', "no json"):
        (tmp_path / "x.jsonl").write_text(content)
        with pytest.raises(UserError, match="not raw samples"):
            read_samples(tmp_path / "x.jsonl")
    lines = planted(4, 0.5, 0.1)
    with pytest.raises(UserError, match="4 ranks lack even"):
        document([lines[0], *(x for x in lines if x["held_out"])], "make skew")
    assert skew_bench.main(["--from", str(tmp_path / "none"), "--out", str(tmp_path / "x.md")]) == 2


def test_real_ranks_give_a_page_and_raw_samples_of_every_call(tmp_path, monkeypatch):
    monkeypatch.setitem(skew_bench.SIZES, "cpu", SIZES)
    out = tmp_path / "skew.md"
    assert skew_bench.main(["--ranks", "2", "--rounds", "2", "--out", str(out)]) == 0
    lines = read_samples(out.with_suffix(".samples.jsonl"))
    assert len(lines) == len(exchanges(SIZES, 2)) and all(len(x["us"]) == 2 and min(x["us"]) > 0 for x in lines)
    assert lines[0]["environment"]["ranks"] == 2 and "environment" not in lines[1]
    page = out.read_text()
    assert "## 2 ranks" in page and "| hot_receiver | 1 | 2.00 |" in page
    again = tmp_path / "again.md"
    assert skew_bench.main(["--from", str(out.with_suffix(".samples.jsonl")), "--out", str(again)]) == 0
    assert again.read_text() == page and json.loads(json.dumps(lines)) == lines


def faulty_task(context, cases) -> None:
    """The exchange leaves the last row of rank 1 unwritten."""
    right = torch.distributed.all_to_all_single

    def wrong(got, sent, receive_G, send_G):
        before = got.clone()
        right(got, sent, receive_G, send_G)
        if context.rank == 1:
            got[-1] = before[-1]

    skew_bench.dist.all_to_all_single = wrong
    try:
        skew_bench.time_exchanges(context, cases, 1)
    finally:
        skew_bench.dist.all_to_all_single = right


def test_nothing_is_timed_where_a_row_does_not_arrive():
    """Negative control."""
    with RankPool(2) as pool, pytest.raises(RankError, match="nothing was timed"):
        pool.run(faulty_task, [Exchange(1 << 14)])
