"""Bars and rank order: computed by hand on invented rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from semmoe.accuracy import bars, document
from semmoe.accuracy import main as accuracy_main
from semmoe.compare import compare
from semmoe.errors import UserError
from semmoe.rank_order import document as order_document
from semmoe.rank_order import median_interval, rank_order, summary
from semmoe.row_files import write_row
from semmoe.whole_model import document as whole_document
from semmoe.whole_model import main as whole_main
from tests.semmoe.compare_rows import AXES, measured, row

SERVED = {"workload": "serve", "batch_tokens": None, "rate_rps": 8.0}


def written(folder, *rows):
    for each in rows:
        write_row(folder, each)
    return compare([folder])


def by_name(comparison):
    return {bar.what: bar for bar in bars(comparison)}


def test_bars_are_the_fixed_ones_or_twice_the_spread(tmp_path):
    steady = [row(config="a", layer_ms=8.0), *measured("a", [10.0, 10.0])]
    noisy = [row(config="b", layer_ms=9.0, placement="eplb"), *measured("b", [8.0, 12.0], placement="eplb")]
    found = by_name(written(tmp_path / "one", *steady))
    assert (found["4 ranks, layer error, median"].figure, found["4 ranks, layer error, median"].allowed) == (
        pytest.approx(20), 10,
    )  # fmt: skip
    assert not found["4 ranks, layer error, median"].met and found["4 ranks, layer error, p90"].met
    found = by_name(written(tmp_path / "two", *noisy))
    assert found["4 ranks, layer error, median"].allowed == pytest.approx(80), "repeats spread by 40 %"
    assert found["4 ranks, Traffic that differs"].met
    assert not found["4 ranks, served TPOT error, median"].met, "what was not measured is not met"


def test_served_bars_look_at_free_running_locality_and_replayed_traffic(tmp_path):
    real = row("harness", "s", **SERVED, tpot_ms=50.0, steps_file="s.npz", lar_measured=0.25)
    free = row(config="s", **SERVED, tpot_ms=54.0, lar_replayed=0.27)
    folder = tmp_path / "run"
    write_row(folder, real), write_row(folder, free)
    write_row(folder / "replay", row(config="s", **SERVED, steps_file="s.npz", lar_replayed=0.25))
    comparison = compare([folder, folder / "replay"])
    found = by_name(comparison)
    assert found["4 ranks, served TPOT error, median"].figure == pytest.approx(8)
    assert found["4 ranks, free-running LAR"].figure == pytest.approx(2) and not found["4 ranks, free-running LAR"].met
    assert found["4 ranks, Traffic that differs"].met
    write_row(folder / "replay", row(config="s", **SERVED, steps_file="s.npz", lar_replayed=0.25, node_bytes=1.0))
    assert by_name(compare([folder, folder / "replay"]))["4 ranks, Traffic that differs"].figure == 1


def test_the_longest_run_of_the_same_policies_is_judged_for_its_lar(tmp_path):
    rows = []
    for config, tokens, told, real in (("s", 600.0, 0.30, (0.25, 0.27)), ("l", 2400.0, 0.26, (0.252, 0.256))):
        rows.append(row(config=config, **SERVED, tokens=tokens, lar_replayed=told))
        rows += [
            row("harness", config, **SERVED, repeat=i, tokens=tokens, steps_file=f"{config}-{i}.npz", lar_measured=lar)
            for i, lar in enumerate(real)
        ]
    comparison = written(tmp_path, *rows)
    bar = by_name(comparison)["4 ranks, free-running LAR"]
    assert (bar.figure, bar.spread, bar.count) == (pytest.approx(0.6), pytest.approx(0.4), 1) and bar.met
    page = document(comparison, "make accuracy")
    assert "| 600 | 0.300 | 0.260 | +4.0 | 2.0 |  |" in page and "| 2400 | 0.260 | 0.254 | +0.6 | 0.4 | yes |" in page


def test_phases_stand_beside_each_other_with_their_errors_and_what_is_off_is_named(tmp_path):
    told = {"gate_ms": 1.0, "dispatch_ms": 4.0, "combine_ms": 2.0, "wait_ms": 0.5}
    real = {"gate_ms": 1.0, "dispatch_ms": 5.0, "combine_ms": 2.0, "wait_ms": 1.0}
    rows = [row(config="a", layer_ms=7.0, **told), row("harness", "a", layer_ms=8.0, **real)]
    page = document(written(tmp_path, *rows), "make accuracy")
    assert "4.00 / 5.00 (-20)" in page and "6.00 / 7.00 (-14)" in page and "0.50 / 1.00 (-50)" in page
    assert "- 4 ranks, dp: dispatch 4.00 / 5.00 ms (-20 %), -12 % of the layer" in page
    assert "gate 1.00 / 1.00 ms" not in page


def test_the_accuracy_page_names_command_machine_and_every_configuration(tmp_path, capsys):
    folder, page = tmp_path / "run", tmp_path / "accuracy.md"
    made = [row(config="a", layer_ms=9.0), *measured("a", [10.0, 10.2])]
    made[1]["environment"] = json.dumps({"cores": 2, "load_1min": 0.5, "cpu": "x"})
    text = document(written(folder, *made), "make accuracy")
    assert "`make accuracy`" in text and "cpu x" in text and "| 4 | dp |" in text and "-10.9" in text
    assert accuracy_main([str(folder), "--out", str(page)]) == 0 and page.read_text().startswith("# Accuracy")
    assert "MISSED" in capsys.readouterr().out
    assert accuracy_main([str(tmp_path / "none")]) == 2


def policies(predicted, real):
    rows = []
    for i, (p, m) in enumerate(zip(predicted, real, strict=True)):
        rows += [row(config=str(i), layer_ms=p, placement=f"p{i}"), *measured(str(i), [m, m], placement=f"p{i}")]
    return rows


def test_rank_order_decides_by_paired_differences_and_tells_agreeing_and_opposite_pairs(tmp_path):
    predicted, real = [1.0, 2.0, 3.0, 5.0, 4.0, 6.0], [10.0, 10.2, 20.0, 30.0, 40.0, 50.0]
    noise = np.random.default_rng(0).normal(0, 0.01, (6, 4))
    noise[1] = noise[0] + [0.1, -0.1, 0.1, -0.1]  # the second jumps about the first from repeat to repeat
    drift = np.array([1.0, 1.1, 1.2, 1.3])  # of the machine, common to all policies: wider than 20 % in all
    rows = []
    for i, (p, m) in enumerate(zip(predicted, real, strict=True)):
        each = (m * drift * np.exp(noise[i])).tolist()
        rows += [row(config=str(i), layer_ms=p, placement=f"p{i}"), *measured(str(i), each, placement=f"p{i}")]
    comparison = written(tmp_path, *rows)
    _, found = rank_order(comparison)
    verdicts = [one.pair.verdict for one in found]
    assert (verdicts.count("undecided"), verdicts.count("opposite"), verdicts.count("same")) == (1, 1, 13)
    assert sum(not one.separate for one in found) > 1, "intervals of single policies overlap where differences decide"
    assert summary(found).startswith("15 pairs: 14 are decided by paired differences, of which 13 agree and 1 disagree")
    text = order_document(comparison, "make rank-order")
    line = next(line for line in text.splitlines() if line.startswith("| 4, 5 |"))
    assert "DISAGREES" in line and "| -25.0 | DISAGREES" in line
    assert "undecided" in next(line for line in text.splitlines() if line.startswith("| 1, 2 |"))


def test_intervals_of_the_median_are_of_the_estimate_and_tell_pairs_apart_that_the_range_does_not(tmp_path):
    assert median_interval([3.0, 1.0, 2.0, 4.0, 6.0, 5.0]) == (1.0, 6.0), "2 / 2^6 outside"
    assert all(np.isnan(median_interval([1.0, 2.0, 3.0, 4.0, 5.0]))), "2 / 2^5 is more than 5 %"
    assert median_interval(range(1, 17)) == (4, 13)
    rows = []
    for i in range(6):
        each = [10.0 + i + x for x in (-9.0, *np.linspace(-0.1, 0.1, 14), 20.0)]
        rows += [
            row(config=str(i), layer_ms=1.0 + i % 5, placement=f"p{i}"),
            *measured(str(i), each, placement=f"p{i}"),
        ]
    comparison = written(tmp_path, *rows)
    _, found = rank_order(comparison)
    assert [abs(one.separate) for one in found] == [1] * 15, "single repeats 9 and 20 ms off do not widen it"
    assert "intervals of the median overlap in 0; of the other 15, 10 agree and 4 disagree" in summary(found)
    text = order_document(comparison, "make rank-order")
    assert "| 10.000 | 9.931 to 10.069 | 1.000 to 30.000 | 1.000 |" in text


def test_policies_that_differ_by_noise_alone_are_not_decided(tmp_path):
    rng, rows = np.random.default_rng(1), []
    for i in range(8):
        each = (10 * np.exp(rng.normal(0, 0.05, 8))).tolist()
        rows += [row(config=str(i), layer_ms=1.0 + i, placement=f"p{i}"), *measured(str(i), each, placement=f"p{i}")]
    _, found = rank_order(written(tmp_path, *rows))
    assert len(found) == 28 and not any(one.pair.apart for one in found)


def test_the_page_says_how_far_pools_of_a_calibration_lie_apart(tmp_path):
    run, page = tmp_path / "run", tmp_path / "accuracy.md"
    written(run, row(config="a", layer_ms=8.0), *measured("a", [10.0, 10.0]))
    told = [("srs", 4.0), ("srs, pools", 31.0), ("gate", 2.0)]
    raw = {
        "environment": {"ranks": 4},
        "collectives_us": [["srs", 4, 0.0, "port", 4, 90.0, 110.0, 100.0]],
        "residuals": [{"operation": op, "median": median, "p90": 2 * median} for op, median in told],
    }
    (run / "cluster-4.samples.json").write_text(json.dumps(raw))
    assert accuracy_main([str(run), "--out", str(page)]) == 0
    assert "| 4 | srs | 3 | 4 | 31 | 62 |" in page.read_text()


def test_rank_order_of_fewer_than_six_policies_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"5 configurations.*needs 6"):
        rank_order(written(tmp_path, *policies([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0])))


def test_one_repeat_of_one_step_decides_nothing(tmp_path):
    rows = policies([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    rows = [r | ({"layer_ms_ci_low": r["layer_ms"], "layer_ms_ci_high": r["layer_ms"]} if r["backend"] == "harness" else {})
            for r in rows if r["repeat"] == 0]  # fmt: skip
    _, found = rank_order(written(tmp_path, *rows))
    assert {one.pair.verdict for one in found} == {"undecided"} and not any(one.pair.apart for one in found)


def test_the_page_of_whole_models_has_layer_attention_and_step_of_every_configuration(tmp_path, capsys):
    page, whole = tmp_path / "whole.md", {"scope": "full_model"}
    rows = [row(config="layers"), *measured("layers", [10.0])]  # of another scope: not on the page
    for form, ms in (("prefill", 4.0), ("decode", 5.0)):
        whole["axes"] = json.dumps(AXES | {"workload": {**AXES["workload"], "form": form}})
        rows += [
            row(config=form, **whole, layer_ms=9.0, attention_ms=2.0),
            *measured(form, [10.0, 10.0], **whole, attention_ms=ms),
        ]
    text = whole_document(written(tmp_path / "run", *rows), "make whole-model")
    assert "| tiny, 4 ranks, layer error, median | 10.0 | 10.0 | % | 0.0 | 2 | yes |" in text
    assert "| tiny, 4 ranks, attention error, median | 55.0 | 10.0 | % | 0.0 | 2 | NO |" in text
    prefill, decode = (
        [line for line in text.splitlines() if line.startswith(f"| {form} /")] for form in ("prefill", "decode")
    )
    assert len(prefill) == len(decode) == 3 and "| 2.00 | 4.00 | -50.0 | 0.0 |" in prefill[1]
    assert "no link speed may be derived" in text and "`make whole-model`" in text
    assert whole_main([str(tmp_path / "run"), "--out", str(page)]) == 0 and "attention" in page.read_text()
    layers_only = tmp_path / "layers"
    write_row(layers_only, row()), write_row(layers_only, row("harness"))
    assert whole_main([str(layers_only), "--out", str(page)]) == 2 and "no whole model" in capsys.readouterr().err
