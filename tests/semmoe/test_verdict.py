"""Verdicts: gain, loss or no gain against the better honest baseline, said as the intervals allow."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from compare_rows import AXES, SEMANTIC, SERVE, folder, line, measured, row
from scipy import stats

from semmoe.compare import compare
from semmoe.verdict import gain


def test_gain_loss_and_no_gain_are_said_in_words(tmp_path):
    fast, same = measured("fast", [5.0, 5.2], **SEMANTIC), measured("same", [9.9, 10.4], placement="eplb")
    slow = measured("slow", [20.0, 21.0], placement="random")
    c = compare(folder(tmp_path, *measured("base", [10.0, 10.2]), *fast, *same, *slow))
    assert line(c, "base").verdict == "baseline"
    assert line(c, "fast").verdict.startswith("50 % faster than the baseline (dp contiguous), 95 % interval 4")
    assert line(c, "same").verdict.startswith("no gain here") and "includes 0" in line(c, "same").verdict
    assert "slower than the baseline (dp contiguous), 95 % interval" in line(c, "slow").verdict
    assert line(c, "fast").gain_pct == pytest.approx(49.5, abs=0.2) and line(c, "slow").gain_high_pct < 0


def test_pairing_repeats_sees_a_gain_that_drift_of_the_machine_hides(tmp_path):
    base, ours = measured("base", [10.0, 20.0, 30.0]), measured("ours", [8.0, 16.2, 23.8], **SEMANTIC)
    assert line(compare(folder(tmp_path, *base, *ours)), "ours").verdict.startswith("20 % faster")
    crossed = measured("ours", [23.8, 8.0, 16.2], **SEMANTIC)  # the same numbers, not together: nothing can be said
    assert line(compare(folder(tmp_path / "x", *base, *crossed)), "ours").verdict.startswith("no gain here")


def test_the_interval_of_the_gain_is_students(tmp_path):
    ours, base = (pd.DataFrame(measured("x", v)) for v in ([9.0, 9.5, 9.2], [10.0, 10.0, 10.0]))
    logs = np.log([0.9, 0.95, 0.92])
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    found = gain(ours, base, "layer_ms")
    assert (found.low_pct, found.high_pct) == pytest.approx((100 * (1 - np.exp(high)), 100 * (1 - np.exp(low))))


def test_one_repeat_without_an_interval_decides_nothing(tmp_path):
    base, ours = row("harness", "base"), row("harness", "ours", layer_ms=9.9, **SEMANTIC)
    c = compare(
        folder(tmp_path, base, ours, row(config="base", layer_ms=1.0), row(config="ours", layer_ms=2.0, **SEMANTIC))
    )
    assert line(c, "ours").verdict.startswith("undecided: +1 %") and math.isnan(line(c, "ours").gain_low_pct)


def test_other_settings_are_no_baseline(tmp_path):
    other = json.dumps(AXES | {"workload": {"kind": "batches", "composition": "by_request"}})
    c = compare(folder(tmp_path, *measured("base", [10.0]), *measured("ours", [5.0], axes=other, **SEMANTIC)))
    assert line(c, "ours").verdict == "no baseline to compare with" and sum(list(c.summary["order"].values())[:3]) == 0


def test_served_configurations_are_judged_end_to_end(tmp_path):
    base = [m | {"e2e_ms": 100.0 + m["repeat"]} for m in measured("base", [10.0, 10.0], **SERVE)]
    ours = [m | {"e2e_ms": 50.0 + m["repeat"]} for m in measured("ours", [30.0, 30.0], **SERVE, **SEMANTIC)]
    assert "% faster end to end than" in line(compare(folder(tmp_path, *base, *ours)), "ours").verdict


def test_predictions_alone_are_labelled_and_near_ties_are_no_gain(tmp_path):
    c = compare(
        folder(
            tmp_path,
            row(config="b"),
            row(config="tie", layer_ms=9.95, placement="eplb"),
            row(config="x", layer_ms=5.0, **SEMANTIC),
        )
    )
    assert line(c, "x").verdict == "50 % faster than the baseline (dp contiguous), predicted and not measured"
    assert line(c, "tie").verdict.startswith("no gain here (predicted)")


def test_attention_tp_is_held_to_the_replicated_flow_where_that_is_better(tmp_path):
    tp = {"flow": "tp_shuffled", "request_scheduler": "-", "token_scheduler": "no_shuffle"}
    replicated = measured("rep", [8.0], flow="tp_replicated", dispatcher="none", request_scheduler="-")
    ours = measured("ours", [9.0], **(tp | {"placement": "semantic", "token_scheduler": "semantic"}))
    c = compare(folder(tmp_path, *replicated, *measured("shuffled", [10.0], **tp), *ours))
    assert "slower than the better baseline (tp_replicated contiguous)" in line(c, "ours").verdict


def test_the_better_of_two_dispatchers_is_the_baseline(tmp_path):
    gathered = measured("gathered", [6.0], dispatcher="allgather_rs")
    c = compare(folder(tmp_path, *gathered, *measured("base", [10.0]), *measured("ours", [8.0], **SEMANTIC)))
    assert "slower than the better baseline (dp allgather_rs contiguous)" in line(c, "ours").verdict
