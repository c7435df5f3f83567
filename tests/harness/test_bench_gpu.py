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

from harness.bench import gpu as bench_gpu
from harness.bench import rows as bench_rows
from harness.bench.cases import Bar, Case
from harness.bench.symmetric_ops import OPERATORS
from tests.harness.fake_cuda import Cuda

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "-m", "harness.bench.gpu", *arguments]
    return subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=200)


def test_dry_run_checks_every_case_and_times_nothing(tmp_path: Path) -> None:
    done = command("--dry-run", "--out", str(tmp_path / "rows.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = "srs sag rank_tokens assign_homes experts_toy exchange_dedup exchange_assignment"
    names += " ranks_srs ranks_sag ranks_srs_sag ranks_exchange"
    assert {r["case"] for r in rows} == set(names.split())
    skipped = [r for r in rows if r["mode"] == "skipped"]
    assert {r["variant"] for r in skipped} == {f"symm_mem.{name}" for name in OPERATORS}
    assert all("needs GPUs" in r["reason"] for r in skipped)  # not "torch has no such operator"
    assert all(r["correct"] and "p50_us" not in r and "speedup" not in r for r in rows)
    assert all(r["mode"] == "dry_run" for r in rows if r not in skipped)
    path = {True: ("shared", "torch"), False: ("virtual", "triton_interpreter")}
    for r in rows:
        about = r["environment"]
        assert (about["transport"], about["kernel_path"]) == path[r["case"].startswith("ranks_")]
    baselines = "index_reduce_scatter all_gather_index unfused all_reduce index_all_to_all"
    assert {r["variant"] for r in rows if r["case"].startswith("ranks_")} >= set(baselines.split())


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

    def fake(run, captured):
        return {"graph_warm": next(times)}, run()

    monkeypatch.setattr(bench_gpu, "graph_times", fake)


@pytest.mark.parametrize(("ours_us", "met"), [(20.0, True), (28.0, False)])
def test_speedup_is_the_baseline_over_ours_and_held_against_the_bar(monkeypatch, ours_us: float, met: bool) -> None:
    timed(monkeypatch, ours_us)
    ours, theirs = bench_gpu.run_case(case(right=True), copy_gbps=1000.0)
    assert ours["speedup"] == pytest.approx(30 / ours_us) and ours["bar_met"] is met
    assert theirs["speedup"] == 1.0
    assert f"{ours['speedup']:.2f}x" in bench_rows.sentence(ours)


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
    assert not ours["correct"] and ours["mode"] == "not_timed" and "WRONG" in bench_rows.sentence(ours)
    assert theirs["correct"] and "speedup" not in theirs and "bar_met" not in theirs


def test_results_that_go_wrong_only_in_replays_are_caught(monkeypatch) -> None:
    monkeypatch.setattr(
        bench_gpu, "graph_times", lambda run, captured: ({"graph_warm": [1.0]}, [torch.full((3,), torch.nan)])
    )
    rows = bench_gpu.run_case(case(right=True), copy_gbps=1000.0)
    assert not any(row["correct"] for row in rows) and not any("speedup" in row for row in rows)


def test_one_gpu_has_no_ranks_to_exchange_between() -> None:
    (row,) = bench_gpu.rank_rows(dry_run=False, gpus=1)
    assert row["mode"] == "skipped" and "two GPUs" in bench_rows.sentence(row)


def test_a_variant_that_writes_rows_which_nobody_uses_is_wrong() -> None:
    """Negative control of the poison: the results alone look right."""
    buffer = torch.empty(5)

    def writes(rows: int):
        buffer[:rows] = 1.0
        return [buffer[:3]]

    variants = {"ours": lambda: writes(3), "theirs": lambda: writes(5), "less": lambda: writes(2)}
    toy = Case("toy", variants, [torch.ones(3)], outputs=[buffer], unused=[buffer[3:]])
    ours, theirs, less = bench_gpu.run_case(toy, copy_gbps=None)
    assert ours["correct"] and not theirs["correct"] and "nobody uses" in theirs["error"]
    assert not less["correct"], "an unwritten row is still NaN"


def test_replays_are_launched_while_the_device_sleeps_and_flushed_before_the_clock_starts() -> None:
    cuda = Cuda()
    flush = lambda: cuda.launch("flush", 7.0)  # noqa: E731
    times_us = bench_gpu.replay_times(lambda: cuda.launch("graph", 0.25), 150, flush, cuda)
    assert times_us == [250.0] * 150
    each = ["flush", "event", "graph", "event"]
    assert cuda.log == ["sleep", *each * 100, "sleep", *each * 50]


def test_a_run_is_repeated_whole_and_rows_carry_the_spread(monkeypatch, tmp_path: Path, capsys) -> None:
    medians = iter([9.0, 11.0, 10.0])

    def whole_run(dry_run: bool):
        base = {"case": "toy", "correct": True, "error": None, "environment": {}}
        yield {**base, "variant": "ours", "mode": "graph_warm", **bench_rows.summary([next(medians)] * 3)}
        yield {**base, "variant": "-", "mode": "skipped", "reason": "one GPU"}

    monkeypatch.setattr(bench_gpu, "whole_run", whole_run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench_gpu.bench(tmp_path / "rows.jsonl", dry_run=False, repeats=3) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    timed = [row for row in rows if row["mode"] == "graph_warm"]
    assert [row["repeat"] for row in timed] == [0, 1, 2] and {row["p50_spread"] for row in timed} == {0.2}
    assert not any("times_us" in row for row in rows)
    raw = [json.loads(line) for line in (tmp_path / "rows.times.jsonl").read_text().splitlines()]
    assert [line["times_us"][0] for line in raw] == [9.0, 11.0, 10.0] and raw[2]["repeat"] == 2
    assert "3 repeats spread by 20.0%" in capsys.readouterr().out


def test_without_a_graph_nothing_is_held_against_a_bar(monkeypatch) -> None:
    modes = {"eager_warm": [40.0], "graph_warm": [20.0]}
    monkeypatch.setattr(bench_gpu, "graph_times", lambda run, captured: (modes, run()))
    rows = bench_gpu.run_case(case(right=True), copy_gbps=1000.0)
    assert {row["mode"]: "bar_met" in row for row in rows} == {"eager_warm": False, "graph_warm": True}


def test_a_pretended_gpu_runs_every_line_and_nothing_reads_the_device_while_a_graph_captures() -> None:
    """Kernels in the interpreter, streams and graphs as stand-ins: control flow, not time."""
    here = Path(__file__).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(here)])
    asked = [sys.executable, "-m", "pretended_gpu"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = found["rows"]
    wrong = [row for row in rows if not row["correct"]]
    assert [row["case"] for row in wrong] == ["spoilt"] and "item reads the device" in wrong[0][
        "error"
    ]  # a negative control
    modes = {"eager_warm", "graph_warm", "graph_cold"}
    assert {row["mode"] for row in rows if row["case"] == "sag"} == modes
    variants = {row["variant"] for row in rows if row["case"] == "experts_toy" and "speedup" in row}
    assert variants == {"kernel", "kernel 16x32", "kernel 16x16", "grouped_mm"}
    eager = [row for row in rows if row["variant"] == "eager"]
    assert [row["mode"] for row in eager if "p50_us" in row] == ["eager_warm"]
    assert {row["reason"] for row in eager if "p50_us" not in row} == {"reads on the host"}
    forked = {tuple(pair) for pair in found["waits"]}
    assert len(forked) > 8 and all((there, here) in forked for here, there in forked), "a stream that is not joined"


def test_bench_gpu_needs_little_of_a_machine() -> None:
    """GPU images have torch and Triton; docs/guide.md names what to carry there."""
    blocked = ["simpy", "networkx", "hydra", "omegaconf", "yaml", "pandas", "matplotlib", "safetensors", "transformers"]
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import harness.bench.gpu, harness.bench.cases, harness.bench.ranks, harness.bench.device, harness.pool
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
