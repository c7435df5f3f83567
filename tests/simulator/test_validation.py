"""Accuracy table: the scoring is fair and can fail, the gate bites, tables come back exactly, constants are reproduced."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from simulator_kit import presets

from semmoe.errors import UserError
from simulator import validate
from simulator.cost.attention_table import AttentionTable
from simulator.cost.deepep import DeepEPLaw
from simulator.cost.expert_table import ExpertTable
from simulator.validation.collectives import curve, nccl_rows
from simulator.validation.deepep import committed_laws, deepep_rows, source_rows, transfer
from simulator.validation.deepep_law import LOW_LATENCY, fit, inputs, near_copies, predicted_us, remote_units, scaled
from simulator.validation.one_file import rows_of_file
from simulator.validation.operators import attention_rows, moe_rows
from simulator.validation.report import anchors_of, judge, table
from simulator.validation.row import Row, held_out, scored
from simulator.validation.vllm_tables import active_experts

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "perfdata"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public measurements are not beside this checkout")
SIZES = 2.0 ** np.arange(9, 30)


def nccl_table(us=lambda size: 10 + size / 1e5):
    rows = [{"system": "x", "nccl_version": "2", "op": "alltoall", "num_gpus": 8, "bytes": s} for s in SIZES]
    return pd.DataFrame(rows).assign(latency_us=[us(size) for size in SIZES])


def test_held_out_scores_only_points_that_the_model_did_not_see():
    seen = []

    def fit_nothing(x, us):
        seen.append(x)
        return lambda at: np.full(at.shape, 7.0)

    scores = held_out(nccl_table(lambda size: 7.0), ["system"], "bytes", "latency_us", fit_nothing)
    assert not set(scores.bytes) & set(seen[0]) and set(scores.bytes) | set(seen[0]) == set(SIZES)
    assert SIZES[0] in seen[0] and SIZES[-1] in seen[0] and (scores.error == 0).all()
    other = held_out(nccl_table(), ["system"], "bytes", "latency_us", fit_nothing, parity=0)
    assert not set(other.bytes) & set(scores.bytes) and set(other.bytes) <= set(seen[0])


def test_a_wrong_point_in_the_middle_is_seen_in_the_error():
    right = held_out(nccl_table(), ["system"], "bytes", "latency_us", curve).error.abs().max()
    bent = nccl_table()
    bent.loc[11, "latency_us"] *= 2  # an odd position: held out
    wrong = held_out(bent, ["system"], "bytes", "latency_us", curve).error.abs().max()
    assert right < 1e-3 and wrong == pytest.approx(0.5, abs=0.01)


def test_bars_are_missed_by_larger_values_and_by_no_number_at_all():
    assert Row("k", "w", {"median": 4.9, "p90": 16.0}, {"median": 5, "p90": 15}).missed == ["p90"]
    assert Row("k", "w", {"mean": -3.0}, {"mean": 2}).missed == ["mean"]
    assert Row("k", "w", {"mean": float("nan")}, {"mean": 2}).missed == ["mean"]
    with pytest.raises(UserError, match="no point to score"):
        scored("k", "w", np.zeros(0))


@pytest.mark.parametrize(
    "value, anchor, regressions, drifts",
    [(4.0, 4.0, 0, 0), (4.3, 4.0, 0, 1), (5.2, 4.9, 1, 0), (4.8, 2.0, 1, 0), (1.0, 4.0, 0, 1), (9.0, 9.0, 0, 0)],
)
def test_the_gate_fails_on_regression_and_warns_on_drift(value, anchor, regressions, drifts):
    found = judge([Row("k", "w", {"median": value}, {"median": 5})], {"k": {"median": anchor}})
    assert (len(found[0]), len(found[1])) == (regressions, drifts)


def test_a_row_without_an_anchor_is_held_to_its_bar():
    assert judge([Row("k", "w", {"median": 6.0}, {"median": 5})], {})[0]
    assert judge([Row("k", "w", {"median": 6.0}, {})], {}) == ([], [])


def test_the_table_says_what_missed_and_what_was_skipped():
    text = table([Row("k", "thing", {"median": 6.0}, {"median": 5}, 3, "why")], {"NCCL": "no file"})
    assert "MISSED: median" in text and "[1] why" in text and "skipped: no file" in text


def test_an_absent_folder_skips_its_rows_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(validate, "null_rows", lambda: [])
    rows, skipped = validate.collect(tmp_path)
    assert not rows and "nccl_intranode.csv not in" in skipped["NCCL"] and len(skipped) == 7


def test_a_regression_gives_a_failing_exit_status(tmp_path, monkeypatch, capsys):
    nccl_table().to_csv(tmp_path / "nccl_intranode.csv", index=False)
    monkeypatch.setattr(validate, "null_rows", lambda: [])
    monkeypatch.setattr(validate, "ANCHORS", tmp_path / "anchors.json")
    options = [f"data={tmp_path}"]
    assert validate.main(options) == 0
    nccl_table(lambda size: 10 + size / 1e5 * (1 + np.log2(size) % 2)).to_csv(
        tmp_path / "nccl_intranode.csv", index=False
    )
    assert validate.main(options) == 1 and "REGRESSION: nccl.pooled" in capsys.readouterr().err


def test_help_says_what_the_command_takes(capsys):
    assert validate.main(["--help"]) == 0 and "data=DIR" in capsys.readouterr().out


def test_unknown_options_and_unreadable_data_are_explained(tmp_path):
    with pytest.raises(UserError, match=r"no option .did you mean 'data'"):
        validate.main(["dat=x"])
    with pytest.raises(UserError, match="no such folder"):
        validate.main([f"data={tmp_path}/none"])
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="columns of no known kind"):
        validate.main([f"data={tmp_path}/x.csv"])


def deepep_table(system, laws=LOW_LATENCY, nodes=(1,), sms=None):
    """Rows that follow these laws exactly; with sms a table of normal mode."""
    shape = {"sglang_version": "1", "num_experts": 256}
    table = pd.DataFrame(
        {"system": system, "node_num": n, "ep_size": 8 * n, "tokens_per_rank": 2**i, "hidden_size": h, "num_topk": k}
        | ({"dispatch_sms": s, "combine_sms": s} if sms else {})
        for n in nodes for i in range(11) for h in (2048, 7168) for k in (4, 8) for s in sms or (1,)
    ).assign(**shape)  # fmt: skip
    for op, law in laws.items():
        table[f"{op}_us"] = inputs(table, op).time_us(law)
    return table


def test_the_law_counts_the_ranks_that_a_token_reaches():
    assert remote_units(128, 8, 8) == pytest.approx(4.67, abs=0.01), "hypergeometric, as published for Qwen3"
    assert near_copies(128, 8, 8, 1) == remote_units(128, 8, 8)
    assert near_copies(8, 8, 8, 2) == pytest.approx(2 * 3), "all choices: its own to 3 near ranks, and its peer's"
    at = inputs(deepep_table("h100_sxm"), "combine")
    assert at.port_bytes[0] == pytest.approx(4 * 7 / 8 * 2048 * 2) and at.tokens[0] == 1


def test_fitting_finds_the_law_that_made_the_times():
    made = {"dispatch": DeepEPLaw(12.0, 200.0), "combine": DeepEPLaw(30, 400, 18.0, 0.5, 1.5)}
    assert fit(deepep_table("h100_sxm", {"dispatch": made["dispatch"]}), "dispatch").floor_us == pytest.approx(12)
    rows = deepep_table("h100_sxm", {"combine": made["combine"]}, sms=(4, 24))
    found = fit(rows, "combine")
    assert asdict(found) == pytest.approx(asdict(made["combine"]), rel=1e-3)
    nodes = DeepEPLaw(20, 400, 9.0, 0.0, 1.5, 33.0)
    across = fit(deepep_table("h100_sxm", {"combine": nodes}, nodes=(2, 4), sms=(4, 24)), "combine", found)
    assert asdict(across) == pytest.approx(asdict(nodes), rel=1e-3)


def test_a_machine_with_the_same_links_is_predicted_by_the_measured_rows_themselves():
    own = {"dispatch": DeepEPLaw(15, 150), "combine": DeepEPLaw(15, 150)}
    source, same = deepep_table("h100_sxm", own), deepep_table("h200_sxm", own)
    law = LOW_LATENCY["dispatch"]
    np.testing.assert_allclose(predicted_us(same, "dispatch", law, source), same.dispatch_us)
    alone = predicted_us(same, "dispatch", law)
    assert np.abs(alone / same.dispatch_us - 1).max() > 0.1, "the law's constants alone are another machine's"
    unknown = deepep_table("own_chip")
    assert np.isnan(predicted_us(unknown, "dispatch", law, source)).all()


def test_twice_the_links_halve_the_part_that_the_links_take():
    made = {op: scaled(law, "b200_sxm") for op, law in LOW_LATENCY.items()}
    table, law = deepep_table("b200_sxm", made), LOW_LATENCY["combine"]
    guess, unscaled = predicted_us(table, "combine", law), inputs(table, "combine").time_us(law)
    np.testing.assert_allclose(guess, law.floor_us + (unscaled - law.floor_us) / 2)
    row = transfer("k", "w", table, "b200_sxm")
    assert row.count == 88 and "450 and 900" in row.note and row.values["median"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["nccl", "deepep"])
def test_one_file_is_told_by_its_columns(tmp_path, kind):
    content = nccl_table() if kind == "nccl" else pd.concat([deepep_table("h100_sxm"), deepep_table("h200_sxm")])
    content.to_csv(tmp_path / "own.csv", index=False)
    keys = [row.key for row in rows_of_file(tmp_path / "own.csv")]
    assert any(key.startswith(kind) for key in keys) and ("deepep.low_latency.h200_sxm.transfer" in keys) == (
        kind != "nccl"
    )


def test_attention_tables_hit_their_points_and_grow_with_the_work_beyond():
    points = [(b, n, 10 + b * n / 100) for b in (1, 4, 16) for n in (100, 200, 1600)]
    made = AttentionTable(points, power=1)
    batch, length, us = np.array(points).T
    np.testing.assert_allclose(made.time_us(batch, length), us)
    assert made.time_us(16, 3200) == pytest.approx(2 * made.time_us(16, 1600))
    assert made.time_us(32, 1600) == pytest.approx(2 * made.time_us(16, 1600))
    assert made.time_us(0, 100) == 0 and made.time_us(1, 10) == pytest.approx(us[0])
    assert AttentionTable(points, power=2).time_us(4, 3200) == pytest.approx(4 * made.time_us(4, 1600))


def test_expert_tables_hit_their_points_and_are_linear_between_counts_of_active_experts():
    made = ExpertTable([(t, a, 40 + 6 * a + t) for a in (8, 16, 64) for t in (1, 10, 100)])
    assert made.time_us(10, 16) == pytest.approx(146) and made.time_us(10, 40) == pytest.approx(290)
    np.testing.assert_allclose(made.time_us([0, 1, 1], [8, 4, 128]), [0, 89, 425])


def test_expected_active_experts_of_even_and_skewed_popularity():
    assert active_experts(1, 0.0) == pytest.approx(4) and active_experts(1e6, 0.0) == pytest.approx(64)
    assert active_experts(16, 1.0) < active_experts(16, 0.0) == pytest.approx(64 * (1 - (15 / 16) ** 16))


def test_committed_anchors_hold_every_bar_of_the_committed_report():
    anchors = json.loads(validate.ANCHORS.read_text())
    report = validate.REPORT.read_text()
    assert "validate anchors=update" in report.splitlines()[2] and len(anchors) > 30
    assert report.count("MISSED") == 1, "the closed form of expert time: p90 of 17 for 15"
    assert f"median {anchors['nccl.pooled']['median']:.2f}" in report


@needs_data
def test_constants_of_the_deepep_law_and_of_the_engine_are_what_their_fits_give():
    from simulator.validation.vllm_run import Engine, PublicRun, fitted_eager_ms

    for mode in ("low_latency", "normal"):
        rows = source_rows(pd.read_csv(DATA / f"deepep_{mode}.csv"))
        for op, law in committed_laws(mode).items():
            assert asdict(fit(rows, op)) == pytest.approx(asdict(law), rel=0.02)
    assert fitted_eager_ms(PublicRun.load(DATA)) == pytest.approx(Engine().eager_ms, abs=0.1)


@needs_data
def test_a_regression_of_the_quick_rows_fails_and_a_drift_warns():
    """All but served runs, nulls and grouped-query attention, which `make validate` adds."""
    names = ("moe_fused_qwen3_30b_a3b", "llmservingsim_rtxpro6000_qwen3_30b_moe", "nccl_intranode")
    fused, by_active, nccl = (DATA / f"{name}.csv" for name in names)
    rows = attention_rows("mla", DATA / "attention_mla_16heads_bf16.csv") + moe_rows(fused, by_active) + nccl_rows(nccl)
    rows += deepep_rows(DATA / "deepep_low_latency.csv", DATA / "deepep_normal.csv")
    regressions, drifts = judge(rows, json.loads(validate.ANCHORS.read_text()))
    for words in drifts:
        warnings.warn(f"drift: {words}; semmoe validate anchors=update renews the table", stacklevel=1)
    assert not regressions and len(anchors_of(rows)) == 27


def test_measured_curves_in_the_presets_are_within_the_bars():
    """What can be checked without the public files: every other size of the committed curves, from the others."""
    held = pd.concat(
        pd.DataFrame({"system": made.name, "op": c.op, "n": c.ranks, "bytes": c.bytes, "us": c.latency_us})
        for made in presets().values() for c in made.curves if c.op != "all_reduce"
    )  # fmt: skip
    error = 100 * held_out(held, ("system", "op", "n"), "bytes", "us", curve).error.abs()
    assert len(error) > 500 and error.median() < 5 and error.quantile(0.9) < 15
