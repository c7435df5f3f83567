"""A fault during a sweep, through the command line: one message, exit status 2, finished rows kept, a rerun continues."""

from __future__ import annotations

import json
import os
import time

import psutil
import pytest

pytest.importorskip("torch")

from harness.environment import environment, usable_cores
from semmoe import cli
from tests.harness.measure_kit import BASE, write_plugins


def test_a_killed_rank_ends_the_sweep_and_a_rerun_finishes_it(tmp_path, monkeypatch, capfd):
    write_plugins(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sweep = ["measure", "-m", *BASE, "name=faults", "flow=dp,tp_shuffled"]
    killer = ["~token_scheduler", "+token_scheduler={_target_: measure_plugins.KillsRankOne}"]
    rows = tmp_path / "results" / "runs" / "faults"
    (tmp_path / "armed").touch()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    assert cli.main([*sweep, *killer]) == 2
    assert time.monotonic() - start < 60, "starting ranks, and at most 30 s to end them"
    said = capfd.readouterr().err
    assert "rank 1 of 2 was killed by SIGKILL during measure_batches; all ranks were ended" in said
    assert "Traceback" not in said
    left = [c for c in psutil.Process().children(recursive=True) if c.status() != "zombie" and c.pid not in before]
    servers = (
        "multiprocessing.resource_tracker",
        "multiprocessing.forkserver",
    )  # Python's own, children of ours for life
    ranks = [c for c in left if c.ppid() != os.getpid() or not any(name in " ".join(c.cmdline()) for name in servers)]
    assert not ranks
    (first,) = rows.glob("*.json")
    kept = first.read_bytes()
    assert json.loads(kept)["flow"] == "dp", "the row that was finished before"
    assert not list(rows.glob("*.partial"))
    (tmp_path / "armed").unlink()
    assert cli.main([*sweep, *killer]) == 0
    assert "1 rows exist already and were kept" in capfd.readouterr().out
    assert len(list(rows.glob("*-r0.json"))) == 2 and first.read_bytes() == kept


def test_environment_names_the_machine_and_counts_usable_cores_only(monkeypatch):
    record = environment(4)
    assert record["ranks"] == 4 and record["cores"] == usable_cores() >= 1
    assert record["torch"][0].isdigit() and record["load_1min"] >= 0
    monkeypatch.setattr("harness.environment._cgroup_quota", lambda: 1.2)
    assert usable_cores() == 1
