"""The reproduction, reduced: rows as committed; percentages as published and as recomputed; pages say both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from semmoe.trace import RoutingTrace
from simulator.paper import published, served
from simulator.paper.affinity import table_1
from simulator.paper.app import PAGES, gather, main, reduced_rows
from simulator.paper.book import Page, write
from simulator.paper.layers import gains_over_better_baseline
from simulator.paper.verdicts import CONFIRMED, GAIN, LOSS, _nulls_said, against_null

COMMITTED = Path(__file__).parents[2] / "results" / "paper"


def test_a_reduced_reproduction_gives_the_committed_rows() -> None:
    ours, theirs = reduced_rows(), pd.read_csv(COMMITTED / "reduced.csv")
    assert list(ours.columns) == list(theirs.columns) and len(ours) == len(theirs)
    learned = (theirs.placement == "semantic").to_numpy()  # a better policy may gain, not lose
    assert (ours.lar_replayed[learned] > theirs.lar_replayed[learned] - 0.03).all()
    for name in ("lar_replayed", "fan_out_replayed", "imbalance_step", "tokens"):  # counted: equal
        np.testing.assert_allclose(ours[name][~learned].astype(float), theirs[name][~learned], rtol=1e-4, err_msg=name)
    for name in ("dispatch_ms", "experts_ms", "combine_ms", "layer_ms"):  # priced: a finer cost model may move them
        np.testing.assert_allclose(ours[name].astype(float), theirs[name], rtol=0.25, err_msg=name)
    assert (theirs.trace == "drawn from profile deepseek-v2-lite (seed 0)").all()


@pytest.mark.parametrize("cell", list(published.TTFT_CLAIM_PCT))
def test_the_papers_percentages_are_taken_over_the_worse_baseline(cell: tuple[str, int]) -> None:
    *baselines, ours = published.TTFT_P99_MS[cell]
    assert published.paper_pct(ours, baselines) == pytest.approx(published.TTFT_CLAIM_PCT[cell], abs=0.1)
    assert published.reduction_pct(ours, baselines) < published.TTFT_CLAIM_PCT[cell]


def test_committed_pages_name_their_command_and_hold_their_rows() -> None:
    there = [name for name in PAGES if (COMMITTED / f"{name}.md").is_file()]
    assert len(there) >= 3
    for name in there:
        assert f"python -m simulator.paper --only {name}" in (COMMITTED / f"{name}.md").read_text(encoding="utf-8")
        assert len(pd.read_csv(COMMITTED / f"{name}.csv")) > 3


def test_table_1_counts_each_token_against_its_types_hottest_experts() -> None:
    routes = np.array([[0, 1], [0, 1], [0, 2], [3, 4]])  # three tokens of one type, one of another
    trace = RoutingTrace(
        model="m", num_experts=6, vocab_size=10, experts_TLk=routes[:, None, :], token_id_T=np.array([7, 7, 7, 8]),
        request_offset_R1=np.array([0, 4]), prompt_len_R=np.array([4]), domain_R=np.array(["x"]), layer_ids_L=np.array([0]),
    )  # fmt: skip
    found = table_1(trace)
    assert found["f1"].tolist() == [np.percentile([1, 1, 0.5, 1], [25, 50, 75]).tolist()]
    assert found["hotness"][0] == pytest.approx(np.percentile([5 / 6, 1], [25, 50, 75]))
    assert found["outside"][0] == pytest.approx(np.percentile([1 / 6, 0], [25, 50, 75]))


def test_gains_are_over_the_better_baseline_of_the_setting() -> None:
    rows = pd.DataFrame(
        [{"cluster": "c", "flow": flow, "dispatcher": d, "policy": policy, "layer_ms": ms}
         for flow, d, policy, ms in (("dp", "allgather_rs", "vanilla", 1.0), ("dp", "a2a_dedup", "vanilla", 2.0),
                                     ("dp", "a2a_dedup", "semantic", 1.5), ("tp_replicated", "none", "two all-reduces", 0.5),
                                     ("tp_shuffled", "a2a_dedup", "semantic", 0.25))]
    )  # fmt: skip
    found = gains_over_better_baseline(rows, ["cluster"]).set_index("flow")
    assert found.loc["dp", "gain_pct"] == pytest.approx(-50) and found.loc["dp", "verdict"] == "slower"
    assert (
        found.loc["tp_shuffled", "gain_pct"] == pytest.approx(50)
        and found.loc["tp_shuffled", "baseline"] == "two all-reduces"
    )


def test_a_curve_searches_its_rate_and_keeps_the_rows_that_it_asked_for(monkeypatch) -> None:
    asked = []

    def row(rate: float) -> dict[str, float]:
        asked.append(rate)
        return {"ttft_ms": 10.0 if rate < 70 else 1e6, "throughput_rps": rate}

    monkeypatch.setattr(served, "at_rate", lambda run, rate: rate)
    monkeypatch.setattr(served, "simulated", row)
    curve = served.Curve(None, {50.0: {"ttft_ms": 10.0, "throughput_rps": 50.0}})  # type: ignore[arg-type]
    found = curve.most(served.Objective(50.0, statistic="mean"))
    assert found.bounded and found.rate_rps == pytest.approx(70, rel=0.021) and 50.0 not in asked
    assert curve.most(served.Objective(50.0, statistic="mean")) == found and len(asked) == len(set(asked))
    assert served._rate(found) == f"{found.rate_rps:.0f}"


def test_a_null_is_confirmed_by_an_interval_around_zero_alone() -> None:
    assert against_null(-3.0, 4.0) == CONFIRMED and against_null(-30.0, -2.0) == LOSS and against_null(1.0, 9.0) == GAIN
    nulls = [(-2.0, 3.0), (-30.0, -10.0), (-9.0, -1.0), (2.0, 9.0)]
    rows = [
        {"public": "null: x", "gain_pct": (low + high) / 2, "low_pct": low, "high_pct": high} for low, high in nulls
    ]
    said = _nulls_said(pd.DataFrame([*rows, {"public": "", "gain_pct": 50.0, "low_pct": 40.0, "high_pct": 60.0}]))
    assert "Of 4 published nulls 1 are confirmed" in said and "in 2 a loss" in said and "in 1 a gain" in said


def test_the_readme_gathers_the_sentences(tmp_path: Path) -> None:
    write(Page("drift", "Drift", "text", pd.DataFrame({"a": [1]}), "It drifts."), tmp_path, "command")
    gather(tmp_path)
    assert "## [Drift](drift.md)\n\nIt drifts." in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_unknown_pages_are_refused() -> None:
    with pytest.raises(Exception, match="no page locallity"):
        main(["--only", "locallity", "--out", "/nonexistent"])


def test_a_page_that_this_code_made_is_kept_until_asked_again(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = []

    def page(book):
        calls.append(book)
        return Page("drift", "Drift", "text", pd.DataFrame({"a": [1]}), f"Made {len(calls)}.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PAGES, "drift", page)
    for words in ([], [], ["--again"], ["--out", "elsewhere"]):
        assert main(["--only", "drift", *words]) == 0
    assert len(calls) == 3 and "kept" in capsys.readouterr().out
    (tmp_path / "results/paper/drift.csv").unlink()
    assert main(["--only", "drift"]) == 0 and len(calls) == 4
