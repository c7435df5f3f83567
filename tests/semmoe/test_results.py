"""Result rows: one schema, whole files only, and the documentation of the columns is the schema."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from compare_rows import row

from semmoe.errors import UserError
from semmoe.results import check_row, columns_document, read_rows, summary_ms, write_row


def test_a_row_comes_back_as_written_and_nan_as_missing(tmp_path):
    write_row(tmp_path, row(lar_planned=float("nan"), tokens=7))
    (back,) = read_rows([tmp_path]).to_dict("records")
    assert (back["tokens"] == 7 and back["lar_planned"] is None) or back["lar_planned"] != back["lar_planned"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_mss": 1.0}, r"unknown column 'layer_mss' \(did you mean 'layer_ms'"),
        ({"tokens": "many"}, "column tokens holds 'many'"),
        ({"flow": None}, "lacks flow"),
    ],
)
def test_rows_outside_the_schema_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        check_row(row() | change)


@pytest.mark.parametrize("when", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_no_half_row_and_keeps_the_old_one(tmp_path, monkeypatch, when):
    write_row(tmp_path, row(layer_ms=1.0))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "write":
        monkeypatch.setattr("builtins.open", full)
    else:
        monkeypatch.setattr(os, when, full)
    with pytest.raises(UserError, match=r"No space left on device.*finished rows are kept"):
        write_row(tmp_path, row(layer_ms=2.0))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1 and read_rows([tmp_path]).layer_ms[0] == 1.0


def test_a_row_that_cannot_be_json_is_not_begun(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_row(tmp_path, row(layer_ms=float("inf")))
    assert not list(tmp_path.iterdir())


def test_summary_has_mean_and_percentiles_and_nothing_for_nothing():
    figures = summary_ms("layer", list(range(1, 101)))
    assert (
        figures["layer_ms"] == 50.5
        and figures["layer_ms_p50"] == 50.5
        and figures["layer_ms_p99"] == pytest.approx(99.01)
    )
    assert summary_ms("layer", []) == {} == summary_ms("layer", [float("nan")])


def test_documented_columns_are_the_schema():
    path = Path(__file__).resolve().parents[2] / "docs" / "columns.md"
    assert path.read_text().strip() == columns_document().strip(), "run: python -m semmoe.results > docs/columns.md"
