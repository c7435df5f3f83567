"""Intervals of predictions: as wide as asked, common errors cancel in gains, coverage is counted from joined rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compare_rows import row

from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.inputs import load_cluster
from semmoe.row_files import write_row
from simulator.cost.uncertainty import CPU, Residuals, interval, possible_ms
from simulator.coverage import cases, main

PHASES = {"gate": 0.01, "dispatch": 0.05, "experts": 0.2, "combine": 0.05}


def cluster(name: str):
    (config,) = compose_all([f"cluster={name}", "planned_folds=0"])
    return load_cluster(config["cluster"])[1]


def test_the_interval_of_a_gain_is_narrower_than_that_of_a_time_because_errors_are_shared() -> None:
    both = possible_ms([PHASES, PHASES], cluster("h100x8"))
    low, high = interval(both[:, 0])
    assert low < sum(PHASES.values()) < high
    gain_low, gain_high = interval(100 * (1 - both[:, 0] / both[:, 1]))
    assert gain_low < 0 < gain_high and gain_high - gain_low < 100 * (high - low) / sum(PHASES.values())


def test_assumed_presets_are_less_certain_than_measured_ones() -> None:
    width = {
        name: np.subtract(*interval(possible_ms([PHASES], cluster(name))[:, 0])[::-1]) for name in ("h100x8", "mi300x8")
    }
    assert width["mi300x8"] > 1.5 * width["h100x8"]


def test_residuals_come_from_the_logs_and_few_of_them_fall_back() -> None:
    found = Residuals.of([0.1, 0.2, 0.3])
    assert found.bias == pytest.approx(0.2) and found.spread > 0.1
    assert Residuals.of([0.1]) == CPU


def test_a_gain_is_as_uncertain_as_differences_within_a_setting_were() -> None:
    rng = np.random.default_rng(0)
    setting, own = rng.normal(0, 0.13, 60), rng.normal(0, 0.05, (2, 60))
    a, b = setting + own
    residuals = Residuals.of([*a, *b], a - b)
    assert 0.7 < residuals.common < 0.95
    both = possible_ms([PHASES, PHASES], cluster("local"), residuals=residuals)
    low, high = interval(np.log(both[:, 0] / both[:, 1]))
    assert 0.75 < np.mean((a - b > low) & (a - b < high)) < 0.9
    unlike = Residuals.of([*a, *b], a - b[::-1])  # pairs of different settings have nothing in common
    assert unlike.common < 0.4


def test_coverage_counts_the_measured_values_inside_and_finds_a_run_that_drifted(tmp_path: Path, capsys) -> None:
    for number in range(8):
        same = {"placement": f"p{number}", "batch_tokens": 100 + number}
        measured = 1.3 if number < 7 else 9.0  # the last is far outside of what the others tell
        for side, layer in (("simulator", 1.0), ("harness", measured * (1 + 0.01 * number))):
            made = row(side, f"c{number}", layer_ms=layer, experts_ms=layer / 2, dispatch_ms=layer / 2, **same)
            write_row(tmp_path, made)
    layers, _ = cases([tmp_path])
    assert len(layers) == 8 and not layers[-1].held
    assert sum(case.held for case in cases([tmp_path], level=0.99)[0]) >= sum(case.held for case in layers)
    assert main([str(tmp_path)]) == 0 and "of 8 values" in capsys.readouterr().out


def test_absurd_levels_and_one_sided_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        main([str(tmp_path), "--level", "2"])
    write_row(tmp_path, row("simulator"))
    with pytest.raises(UserError, match="both simulated and measured"):
        cases([tmp_path])
