"""What the command line starts: pools of ranks for runs, and what lies beside a row."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from harness import app
from harness.measure import Measured
from semmoe.session import folder_of
from tests.harness.measure_kit import build


def test_every_repeat_has_ranks_of_its_own_except_under_torchrun(monkeypatch, tmp_path):
    opened, times = [], {"layer": np.full((2, 3), 0.5), "step": np.ones(2)}
    monkeypatch.setattr(app, "open_pool", lambda ranks, *_: opened.append(ranks) or nullcontext())
    monkeypatch.setattr(app, "preflight", lambda pool, runs: "")
    monkeypatch.setattr(
        app, "measure_run", lambda pool, run: Measured(run.identity("harness", "shared", "torch"), None, times)
    )
    run = build(f"results_dir={tmp_path}")
    repeats = [replace(run, repeat=r) for r in (0, 0, 1, 2)]
    rows = [row for _, row in app.measure(repeats)]
    assert len(rows) == 4 and opened == [2, 2, 2]
    for row in rows:
        with np.load(folder_of(run.cfg) / row["times_file"]) as kept:
            assert {name: kept[name].tolist() for name in kept} == {name: ms.tolist() for name, ms in times.items()}
    opened.clear()
    monkeypatch.setattr(app, "under_torchrun", lambda: True)
    assert len(list(app.measure(repeats))) == 4 and opened == [2]
