"""Result rows: one schema, whole files only, and the documentation of the columns is the schema."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_rows import row

from semmoe.errors import UserError
from semmoe.results import check_row, columns_document, summary_ms
from semmoe.row_files import read_rows, write_row


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


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_a_row_that_cannot_be_json_is_not_begun(tmp_path, value):
    with pytest.raises(UserError, match=r"layer_ms holds -?inf; finite float( of at least 0)? is right"):
        write_row(tmp_path, row(layer_ms=value))
    assert not list(tmp_path.iterdir())


SWEEP = """
import os, sys
from compare_rows import row
from semmoe.row_files import write_row
folder, when = sys.argv[1:]
write_row(folder, row(config="first"))
real = getattr(os, when)
def stop(*args):
    if when == "replace":
        print("stopped", flush=True)
        sys.stdin.read()  # held here until the test kills the process
    return real(*args)
def half(fd):
    os.truncate(fd, 40)  # what a disk holds when power goes before the data is down
    print("stopped", flush=True)
    sys.stdin.read()
setattr(os, when, half if when == "fsync" else stop)
write_row(folder, row(config="second"))
"""


@pytest.mark.parametrize("when", ["fsync", "replace"])
def test_a_sweep_killed_while_it_writes_leaves_whole_rows_and_continues(tmp_path, when):
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(tmp_path), when], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    try:
        assert process.stdout.readline() == "stopped\n"
    finally:
        process.kill()
        process.communicate()
    assert len(list(tmp_path.iterdir())) == 2, "the sweep was not stopped in the middle of a row"
    assert read_rows([tmp_path]).config_id.tolist() == ["first"]
    write_row(tmp_path, row(config="second"))
    assert sorted(read_rows([tmp_path]).config_id) == ["first", "second"]


def test_summary_has_mean_and_percentiles_and_nothing_for_nothing():
    figures = summary_ms("layer", list(range(1, 101)))
    expected = {"": 50.5, "_p10": 10.9, "_p50": 50.5, "_p90": 90.1, "_p99": 99.01}
    assert figures == pytest.approx({f"layer_ms{q}": ms for q, ms in expected.items()})
    assert summary_ms("layer", []) == {} == summary_ms("layer", [float("nan")])


def test_documented_columns_are_the_schema():
    path = Path(__file__).resolve().parents[2] / "docs" / "columns.md"
    assert path.read_text().strip() == columns_document().strip(), "run: python -m semmoe.results > docs/columns.md"
