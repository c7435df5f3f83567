"""The page of the micro-benchmark: curves by rising LAR, both backends in each cell, SRS + SAG over plain collectives."""

from __future__ import annotations

import json

import pytest

from semmoe.errors import UserError
from semmoe.micro import curves, document
from semmoe.micro import main as micro_main
from semmoe.row_files import read_rows, write_row
from tests.semmoe.compare_rows import measured, row


def rows_in(folder):
    times = {"dispatch_ms": 6.0, "combine_ms": 2.0}
    for config, lar, layer in (("high", 0.8, 9.0), ("low", 0.3, 12.0)):
        write_row(folder, row(config=config, lar_replayed=lar, layer_ms=layer, **times))
        for each in measured(config, [layer, layer + 2], lar_measured=lar, **times):
            write_row(folder, each)
    for flow, srs, sag in (("tp_scattered", 2.0, 2.0), ("tp_shuffled", 2.1, 2.3)):
        write_row(folder, row(config=flow, flow=flow, request_scheduler="-", srs_ms=srs, sag_ms=sag))
    return read_rows([folder])


def test_curves_rise_in_lar_and_hold_both_backends(tmp_path):
    found = curves(rows_in(tmp_path))
    assert found.lar.tolist() == pytest.approx([0.3, 0.8])
    assert found["simulator layer_ms"].tolist() == [12.0, 9.0] and found["harness layer_ms"].tolist() == [13.0, 10.0]
    assert (found["simulator all_to_all_ms"] == 8.0).all()
    assert found.spread_pct.tolist() == pytest.approx([100 * 2 / 13, 20])


def test_the_page_shows_gain_and_overhead(tmp_path):
    text = document(rows_in(tmp_path), "make micro")
    assert "| a2a_dedup | 0.800 | 8.000 / 8.000 | 4.000 / 4.000 | 9.000 / 10.000 | 20 | 25.0 / 23.1 |" in text
    assert "SRS + SAG over reduce-scatter + all-gather: 10.0 / - % more" in text
    assert micro_main([str(tmp_path), "--out", str(tmp_path / "page.md")]) == 0


def test_rows_without_a_curve_are_refused(tmp_path):
    write_row(tmp_path, row(config="x", flow="tp_shuffled", request_scheduler="-"))
    with pytest.raises(UserError, match="experiment=micro"):
        document(read_rows([tmp_path]), "make micro")
    assert micro_main([str(tmp_path / "none")]) == 2


def test_phases_and_the_line_over_bytes_say_why_a_curve_is_flat(tmp_path):
    """All-to-all takes 5 ms + 1 ms a MB; repeats differ by 0.1 ms, then by 9."""
    for spread_ms, flat in ((0.1, False), (9.0, True)):
        folder = tmp_path / str(flat)
        for config, lar, megabytes in (("a", 0.3, 4.0), ("b", 0.5, 3.0), ("c", 0.9, 1.0)):
            sizes = {"dispatch_bytes": megabytes * 2e6, "combine_bytes": megabytes * 2e6, "lar_measured": lar}
            times = {"dispatch_ms": 2.0 + megabytes / 2, "combine_ms": 3.0 + megabytes / 2, "wait_ms": 0.75}
            for each in measured(config, [20.0, 20.0 + spread_ms], **sizes, **times):
                write_row(folder, each)
        text = document(read_rows([folder]), "make micro")
        assert "- a2a_dedup, harness: all-to-all = 5 ms + 1,000.0 us a MB" in text
        assert "3.00 MB fewer, worth 3 ms of 9" in text and ("the curve is flat because" in text) is flat
        assert (
            "| a2a_dedup | 0.300 | 4.00 | - / - | - / - | - / 4.000 | - / 5.000 | - / 4.000 | - / - | - / 0.750 | - / - |"
            in text
        )


def test_token_ranking_is_shown_where_its_rows_are_and_refused_where_they_are_wrong(tmp_path):
    made = rows_in(tmp_path)
    assert "Token ranking" not in document(made, "make micro", [tmp_path])
    lines = [
        {"tokens": 4096, "ranks": 8, "variant": name, "repeat": i, "correct": True, "p50_us": us, "p50_spread": 0.1}
        for i in range(2)
        for name, us in (("one_pass", 20.0), ("sort_pipeline", 160.0))
    ]
    file = tmp_path / "token_ranking.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "| 4096 | 8 | 20.0 | 160.0 | 8.00 | 10 |" in document(made, "make micro", [tmp_path])
    file.write_text(json.dumps(lines[0] | {"correct": False}))
    with pytest.raises(UserError, match="rankings differ"):
        document(made, "make micro", [tmp_path])
