"""The benchmark of one GPU, dry: every case is checked on a CPU, a wrong variant is caught, ratios are withheld then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from harness import bench_gpu
from harness.bench_cases import Bar, Case

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-m", "harness.bench_gpu", *arguments]
    return subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=200)


def test_dry_run_checks_every_case_and_times_nothing(tmp_path: Path) -> None:
    done = command("--dry-run", "--out", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = "srs sag rank_tokens assign_homes experts_toy exchange_dedup exchange_assignment"
    assert {r["case"] for r in rows} == set(names.split())
    assert all(r["correct"] and r["mode"] == "dry_run" and "p50_us" not in r and "speedup" not in r for r in rows)
    assert all(r["environment"]["kernel_path"] == "triton_interpreter" for r in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_message_names_the_dry_run(tmp_path: Path, capsys) -> None:
    assert bench_gpu.main(["--out", str(tmp_path / "rows.jsonl")]) == 2
    assert "--dry-run" in capsys.readouterr().err and not list(tmp_path.iterdir())


def case(right: bool) -> Case:
    one = torch.ones(3)
    variants = {"ours": lambda: [one if right else one + 0.5], "theirs": lambda: [one]}
    return Case("toy", variants, [one], bar=Bar("speedup", 1.25, "theirs"))


def timed(monkeypatch: pytest.MonkeyPatch, ours_us: float) -> None:
    """graph_times with given microseconds: the arithmetic behind the rows, without a GPU."""
    times = iter([[ours_us] * 10, [30.0] * 10])

    def fake(run):
        return {"graph_warm": next(times)}, run()

    monkeypatch.setattr(bench_gpu, "graph_times", fake)


@pytest.mark.parametrize(("ours_us", "met"), [(20.0, True), (28.0, False)])
def test_speedup_is_the_baseline_over_ours_and_held_against_the_bar(monkeypatch, ours_us: float, met: bool) -> None:
    timed(monkeypatch, ours_us)
    ours, theirs = bench_gpu.run_case(case(right=True), copy_gbps=1000.0)
    assert ours["speedup"] == pytest.approx(30 / ours_us) and ours["bar_met"] is met
    assert theirs["speedup"] == 1.0
    assert f"{ours['speedup']:.2f}x" in bench_gpu.sentence(ours)


def test_share_of_the_copy_bandwidth_is_bytes_over_time(monkeypatch) -> None:
    timed(monkeypatch, 10.0)
    moved = Case(
        "toy", {"ours": lambda: [torch.ones(1)]}, [torch.ones(1)], moved_bytes=8_000_000, bar=Bar("share", 0.8)
    )
    (row,) = bench_gpu.run_case(moved, copy_gbps=1000.0)  # 8 MB in 10 us: 800 GB/s
    assert row["copy_share"] == pytest.approx(0.8) and row["bar_met"]


def test_a_wrong_variant_is_not_timed_and_no_ratio_of_its_case_is_given(monkeypatch) -> None:
    """Negative control."""
    timed(monkeypatch, 20.0)
    ours, theirs = bench_gpu.run_case(case(right=False), copy_gbps=1000.0)
    assert not ours["correct"] and ours["mode"] == "not_timed" and "WRONG" in bench_gpu.sentence(ours)
    assert theirs["correct"] and "speedup" not in theirs and "bar_met" not in theirs


def test_results_that_go_wrong_only_in_replays_are_caught(monkeypatch) -> None:
    monkeypatch.setattr(bench_gpu, "graph_times", lambda run: ({"graph_warm": [1.0]}, [torch.full((3,), torch.nan)]))
    rows = bench_gpu.run_case(case(right=True), copy_gbps=1000.0)
    assert not any(row["correct"] for row in rows) and not any("speedup" in row for row in rows)
