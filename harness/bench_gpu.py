"""One command that checks, times and writes rows on one GPU, all ranks virtual.

    python -m harness.bench_gpu              make bench-gpu; rows in results/gpu.jsonl
    python -m harness.bench_gpu --dry-run    on a CPU: every case checked on small sizes, nothing timed

Every variant is checked against the reference first, outputs filled with NaN; then it is captured in a CUDA graph, which
is replayed 1,000 times with warm caches and 100 times after a flush of 256 MB; the last results are checked again. Where
any variant of a case is wrong, no ratio of that case is printed and the command fails.

A row (one JSON line): case, variant, mode (graph_warm, graph_cold, dry_run), p10_us .. p99_us, moved_bytes, copy_share (of
the bandwidth of one large copy, measured here), speedup over the baseline, bar, correct, and the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from semmoe.errors import UserError

from .environment import environment

if TYPE_CHECKING:
    from .bench_cases import Case

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
REPLAYS = {"graph_warm": 1000, "graph_cold": 100}
PERCENTILES = (10, 50, 90, 99)


def bench(out: Path, dry_run: bool) -> int:
    """Write the rows; 0 when every variant was correct, else 1. UserError without a GPU, unless `dry_run`."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, just below
    elif not torch.cuda.is_available():
        raise UserError("bench-gpu needs a CUDA device; --dry-run checks every case on a CPU")
    from . import bench_cases

    sizes = bench_cases.DRY if dry_run else bench_cases.FULL
    about = {
        **environment(sizes.ranks),
        **gpu_environment(),
        "transport": "virtual",
        "kernel_path": kernel_path(dry_run),
    }
    copy_gbps = None if dry_run else copy_bandwidth_gbps()
    wrong = 0
    rows: list[dict[str, Any]] = []
    for case in bench_cases.cases(sizes):
        made = run_case(case, copy_gbps)
        wrong += sum(not row["correct"] for row in made)
        rows += [{**row, "copy_gbps": copy_gbps, "environment": about} for row in made]
        for row in made:
            print(sentence(row))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows in {out}" + (f"; {wrong} wrong" if wrong else ""))
    return 1 if wrong else 0


def run_case(case: Case, copy_gbps: float | None) -> list[dict[str, Any]]:
    """Check every variant, then time every one; ratios only if all are correct. copy_gbps None: nothing is timed."""
    errors = {name: failure(partial(case.check, name)) for name in case.variants}
    rows = []
    for name, run in case.variants.items():
        base = {"case": case.name, "variant": name, "correct": errors[name] is None, "error": errors[name]}
        if copy_gbps is None or errors[name] is not None:
            rows.append({**base, "mode": "dry_run" if copy_gbps is None else "not_timed"})
            continue
        times_us, results = graph_times(run)
        after = failure(partial(case.verify, name, results))
        base |= {"correct": after is None, "error": after}
        rows += [{**base, "mode": mode, **summary(times)} for mode, times in times_us.items()]
    if all(row["correct"] for row in rows):
        add_ratios(rows, case, copy_gbps)
    return rows


def add_ratios(rows: list[dict[str, Any]], case: Case, copy_gbps: float | None) -> None:
    """copy_share and speedup (medians of one mode), and whether the bar is met: of the cold rows, shares need memory."""
    for row in rows:
        if "p50_us" not in row:
            continue
        if case.moved_bytes and copy_gbps:
            row["moved_bytes"] = case.moved_bytes
            row["copy_share"] = case.moved_bytes / row["p50_us"] / 1e3 / copy_gbps
        if case.bar is None:
            continue
        if case.bar.kind == "speedup":
            baseline = next(r for r in rows if r["variant"] == case.bar.baseline and r["mode"] == row["mode"])
            row["speedup"] = baseline["p50_us"] / row["p50_us"]
        reached = row["copy_share" if case.bar.kind == "share" else "speedup"]
        row |= {"bar_kind": case.bar.kind, "bar": case.bar.value, "bar_met": reached >= case.bar.value}


def failure(check: Callable[[], None]) -> str | None:
    """The first line of what is wrong, or None."""
    try:
        check()
    except AssertionError as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else "results differ"
    return None


def graph_times(run: Callable[[], Sequence[Tensor]]) -> tuple[dict[str, list[float]], Sequence[Tensor]]:
    """(microseconds of every replay by mode, results of the last replay). The capture holds one call of `run`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times_us = {}
    for mode, replays in REPLAYS.items():
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        torch.cuda.synchronize()
        for start, end in events:
            if mode == "graph_cold":
                flush.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times_us[mode] = [start.elapsed_time(end) * 1e3 for start, end in events]
    return times_us, results


def copy_bandwidth_gbps() -> float:
    """Bytes read and written a second by one large copy, median of 50."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    times_us, _ = graph_times(lambda: [b.copy_(a)])
    return 2 * COPY_BYTES / summary(times_us["graph_cold"])["p50_us"] / 1e3


def summary(times_us: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(times_us)
    ranks = {p: min(round(p / 100 * (len(ordered) - 1)), len(ordered) - 1) for p in PERCENTILES}
    return {f"p{p}_us": ordered[at] for p, at in ranks.items()} | {"replays": len(ordered)}


def gpu_environment() -> dict[str, Any]:
    """Device, driver, CUDA, clocks, power and temperature, as far as they can be read."""
    if not torch.cuda.is_available():
        return {"gpu": None, "mode": "dry run on a CPU: correctness only"}
    names = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        asked = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader", "-i", "0"]
        state = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        state = ""
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_state_before": state,
        "cuda": torch.version.cuda,
        "mode": "CUDA graph, one GPU, virtual ranks: no link speed may be derived from them",
    }


def kernel_path(dry_run: bool) -> str:
    return "triton_interpreter" if dry_run else "triton"


def sentence(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    head = f"{row['case']:26} {row['variant']:14} {row['mode']:11}"
    if not row["correct"]:
        return f"{head} WRONG: {row['error']}"
    if "p50_us" not in row:
        return f"{head} correct, not timed"
    text = f"{head} {row['p50_us']:9.1f} us (p10 {row['p10_us']:.1f}, p99 {row['p99_us']:.1f})"
    if "copy_share" in row:
        text += f", {row['copy_share']:.0%} of copy bandwidth"
    if "speedup" in row:
        text += f", {row['speedup']:.2f}x"
    if "bar" in row:
        text += f", bar {row['bar']:g} {'met' if row['bar_met'] else 'missed'}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time every kernel on one GPU with virtual ranks.")
    parser.add_argument("--out", type=Path, help="default results/gpu.jsonl, dry runs results/runs/gpu_dry_run.jsonl")
    parser.add_argument("--dry-run", action="store_true", help="check every case on a CPU, time nothing")
    chosen = parser.parse_args(arguments)
    usual = Path("results/runs/gpu_dry_run.jsonl" if chosen.dry_run else "results/gpu.jsonl")
    try:
        return bench(chosen.out or usual, chosen.dry_run)
    except UserError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
