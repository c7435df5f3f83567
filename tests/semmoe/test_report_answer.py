"""The verdict box says what the rows say: pays, does not, or not known, with the reason that the figures give."""

from __future__ import annotations

import json

import pytest
from compare_rows import measured, row

from semmoe.compare import compare
from semmoe.report.answer import answer
from semmoe.report.before_after import _pairs, pair_traffic, step_timeline
from semmoe.report.sweeps import batch_sizes, rates
from semmoe.row_files import write_row

OURS = {"placement": "semantic", "request_scheduler": "semantic_request"}


def said(folder, rows):
    for one in rows:
        write_row(folder, one)
    comparison = compare([folder])
    verdict = answer(comparison)
    return verdict.kind, verdict.headline, dict(verdict.points), comparison


def test_a_gain_that_holds_is_told_with_its_size_interval_and_reason(tmp_path):
    better = {"lar_measured": 0.6, "bytes_per_token_measured": 50.0, "dispatch_ms": 2.0, **OURS}
    rows = [*measured("base", [10.0, 10.1, 9.9]), *measured("ours", [8.0, 8.1, 7.9], **better)]
    kind, headline, points, _ = said(tmp_path, rows)
    assert kind == "gain" and headline == "Yes: it pays here, by 20 % of the time of an MoE layer."
    assert "95 % interval" in points["By how much"] and "dp" in points["By how much"]
    assert "LAR 0.25 → 0.60" in points["Why"] and "exchange ms 6 → 2" in points["Why"]
    assert points["How sure"].startswith("3 repeats") and "t.npz" in points["How sure"]


def test_bytes_that_fall_without_saving_time_are_given_as_the_reason(tmp_path):
    fewer = {"lar_measured": 0.6, "bytes_per_token_measured": 50.0, **OURS}
    rows = [*measured("base", [10.0, 10.2, 9.9]), *measured("ours", [10.1, 10.0, 10.1], **fewer)]
    kind, headline, points, _ = said(tmp_path, rows)
    assert kind == "even" and headline.startswith("No gain here: the configuration tried is not faster")
    assert "Bytes fall by 50 %" in points["Why"] and "start-up and waiting" in points["Why"]


@pytest.mark.parametrize(
    ("layer_ms", "kind", "words"),
    [(8.0, "gain", "Probably: it pays here, by 20 %"), (10.05, "even", "No gain"), (12.0, "loss", "is 20 % slower")],
)
def test_a_prediction_is_called_one(tmp_path, layer_ms, kind, words):
    found, headline, points, _ = said(tmp_path, [row(config="base"), row(config="ours", layer_ms=layer_ms, **OURS)])
    assert found == kind and words in headline and "nothing was measured" in headline
    assert "Predicted alone" in points["How sure"]


def test_one_repeat_decides_nothing(tmp_path):
    kind, headline, *_ = said(tmp_path, [*measured("base", [10.0]), *measured("ours", [5.0], **OURS)])
    assert kind == "open" and "measured once" in headline


def test_repeats_that_differ_widely_decide_nothing(tmp_path):
    rows = [*measured("base", [10.0, 30.0, 9.0]), *measured("ours", [20.0, 9.0, 25.0], **OURS)]
    kind, headline, *_ = said(tmp_path, rows)
    assert kind == "open" and "could hide in the noise" in headline


@pytest.mark.parametrize(("changes", "told"), [(OURS, "No baseline"), ({}, "Every row is a baseline")])
def test_without_a_pair_there_is_no_answer_but_a_remedy(tmp_path, changes, told):
    kind, headline, points, _ = said(tmp_path, [row(config="ours", **changes)])
    assert kind == "open" and headline.startswith("No answer")
    assert points["Why"].startswith(told) and "placement=contiguous" in points["What next"]


def test_the_terminal_ends_with_the_same_answer(tmp_path):
    _, headline, points, comparison = said(tmp_path, [row(config="base"), row(config="ours", layer_ms=8.0, **OURS)])
    lines = comparison.render().splitlines()
    assert headline in lines[-8:] and lines[lines.index(headline) + 1].startswith("By how much: ")
    assert "LAR" in points["Why"]


def test_settings_are_counted_and_named(tmp_path):
    rows = []
    for batch, ms in ((64, 10.05), (4096, 5.0)):
        rows += [row(config=f"base{batch}", batch_tokens=batch)]
        rows += [row(config=f"ours{batch}", batch_tokens=batch, layer_ms=ms, **OURS)]
    kind, headline, points, comparison = said(tmp_path, rows)
    assert kind == "gain" and headline.startswith("It pays in 1 of 2 settings, by 50 %, no gain in 1.")
    assert points["Where"].startswith("batch_tokens 4096: +50 %; batch_tokens 64:")
    left, right = batch_sizes(comparison).axes
    curves = [line for line in left.lines if len(line.get_xdata()) == 2]
    assert list(curves[0].get_xdata()) == [16, 1024]
    assert list(curves[0].get_ydata()) == pytest.approx([60, 60])  # 6 of 10 ms in exchange
    gains = [list(line.get_ydata()) for line in right.lines if len(line.get_ydata()) == 2]
    assert any(gain == pytest.approx([-0.5, 50]) for gain in gains)


def test_pair_traffic_shows_shares_of_each_home_and_the_bytes_that_were_sent(tmp_path):
    rows = [row(config="base"), row(config="ours", layer_ms=5.0, dispatcher="a2a_assignment", **OURS)]
    *_, comparison = said(tmp_path, rows)
    for _, line in comparison.table.iterrows():
        percent, sent_kb = _pairs(comparison, line)
        assert percent.sum(axis=1) == pytest.approx(100) and percent[0] == pytest.approx([40, 10, 30, 20])
        assert sent_kb[0, 1] == pytest.approx(2.5 / 2 * 10 / 240)  # of 2,500 bytes in 2 steps, 10 of 240 remote pairs
    assert len(pair_traffic(comparison).axes) == 6


def test_a_timeline_is_as_long_as_its_spans_and_shows_who_waits(tmp_path):
    *_, comparison = said(tmp_path, [row(config="base"), row(config="ours", layer_ms=5.0, **OURS)])
    upper = step_timeline(comparison).axes[0]
    ends = [bar.get_x() + bar.get_width() for bars in upper.containers for bar in bars]
    assert max(ends) == 10.0 and 8.0 in ends  # rank 2 works 2 of the experts' 4 ms


def test_a_rate_curve_has_a_point_for_every_rate_in_their_order(tmp_path):
    rows = []
    for rate, p90 in ((20.0, 90.0), (10.0, 40.0)):
        axes = json.dumps({"workload": {"kind": "serve", "rate_rps": rate}})
        rows += [row(config=f"r{rate}", workload="serve", rate_rps=rate, batch_tokens=None, throughput_rps=rate, axes=axes,
                     ttft_ms_p90=p90, slo_ttft_ms=50.0)]  # fmt: skip
    *_, comparison = said(tmp_path, rows)
    (axes,) = rates(comparison).axes
    assert axes.lines[0].get_xdata().tolist() == [10, 20] and axes.lines[0].get_ydata().tolist() == [40, 90]
    assert any(line.get_ydata()[0] == 50 for line in axes.lines)


def test_configurations_that_differ_in_another_axis_are_curves_of_their_own(tmp_path):
    rows = []
    for batch in (64, 512):
        for order in ("shuffled", "sequential"):
            axes = json.dumps({"workload": {"kind": "batches", "batch_tokens": batch, "composition": order}})
            rows.append(row(config=f"{order}{batch}", batch_tokens=batch, axes=axes))
    *_, comparison = said(tmp_path, rows)
    left, _ = batch_sizes(comparison).axes
    curves = {line.get_label(): list(line.get_xdata()) for line in left.lines if not line.get_label().startswith("_")}
    assert curves == {"dp / sequential": [16, 128], "dp / shuffled": [16, 128]}


def test_what_was_not_swept_has_no_sweep_figure(tmp_path):
    *_, comparison = said(tmp_path, [row(config="base"), row(config="ours", **OURS)])
    assert batch_sizes(comparison) is None and rates(comparison) is None
