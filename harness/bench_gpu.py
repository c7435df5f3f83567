"""One command that checks, times and writes rows on one GPU, all ranks virtual.

    python -m harness.bench_gpu              make bench-gpu; rows in results/gpu.jsonl
    python -m harness.bench_gpu --dry-run    on a CPU: every case checked on small sizes, nothing timed

With two GPUs or more, shuffle and exchange between them are checked and timed too (bench_ranks.py), against NCCL's calls
and torch's symmetric-memory operators; with one, a row says why not.

Every variant is checked against the reference first, outputs filled with NaN; then it is captured in a CUDA graph, which
is replayed 1,000 times with warm caches and 100 times after a flush of 256 MB; the last results are checked again. Where
any variant of a case is wrong, no ratio of that case is printed and the command fails.

A row (one JSON line): case, variant, mode (graph_warm, graph_cold, dry_run; between GPUs eager_warm, eager_cold; skipped),
p10_us .. p99_us, moved_bytes, copy_share (of the bandwidth of one large copy, measured here), speedup over the baseline,
bar, correct, error, reason (of a skip), and the environment. Between GPUs also ranks, tokens, ours_speedup (this variant's
time over that of ours), busbw_gbps (nccl-tests' convention) and link_share (of the bandwidth of one large peer copy).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from semmoe.errors import UserError

from .environment import environment, gpu_libraries, gpu_state

if TYPE_CHECKING:
    from .bench_cases import Case
    from .bench_ranks import RankSizes, Timed

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
REPLAYS = {"graph_warm": 1000, "graph_cold": 100}
PERCENTILES = (10, 50, 90, 99)
MOST_RANKS, RANK_TOKENS, RANK_ROUNDS = 8, (128, 4096), 100  # between GPUs


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
    for row in rank_rows(dry_run):
        wrong += not row["correct"]
        rows.append({**row, "environment": about | between(row)})
        print(sentence(row))
    after = [] if dry_run else gpu_state()
    for row in rows:
        row["environment"]["gpu_state_after"] = after
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


def rank_rows(dry_run: bool, gpus: int | None = None) -> list[dict[str, Any]]:
    """Rows of real ranks: one a GPU, where there are two or more; two CPU processes in a dry run. gpus: as if so many."""
    from .bench_ranks import RankSizes, bench_ranks
    from .links import peer_copy_gbps
    from .pool import RankPool

    ranks = 2 if dry_run else min(torch.cuda.device_count() if gpus is None else gpus, MOST_RANKS)
    about = (
        {"transport": "shared", "kernel_path": "torch"}
        if dry_run
        else {"transport": "symmetric", "kernel_path": "triton"}
    )
    if ranks < 2:
        reason = "shuffle and exchange between ranks need two GPUs or more, this machine has one"
        return [
            {"case": "between_ranks", "variant": "-", "mode": "skipped", "correct": True, "reason": reason, **about}
        ]
    dry = RankSizes(24, 32, 8, 2, torch.float32, "shared", "torch", rounds=0)
    full = [RankSizes(t, 2048, 128, 8, torch.bfloat16, "symmetric", "triton", RANK_ROUNDS) for t in RANK_TOKENS]
    rows: list[dict[str, Any]] = []
    with RankPool(ranks, timeout_s=300.0) as pool:
        link_gbps = None if dry_run else min(pool.run(peer_copy_gbps, COPY_BYTES))
        for sizes in [dry] if dry_run else full:
            for timed_G in zip(*pool.run(bench_ranks, sizes), strict=True):
                rows += timed_rows(timed_G, sizes, link_gbps, about)
    return rows


def between(row: dict[str, Any]) -> dict[str, Any]:
    """What differs in the environment of a row of real ranks."""
    mode = "eager, two CPU processes" if row["transport"] == "shared" else "eager, one rank a GPU"
    return {"transport": row["transport"], "kernel_path": row["kernel_path"], "ranks": row.get("ranks"), "mode": mode}


def timed_rows(
    timed_G: Sequence[Timed], sizes: RankSizes, link_gbps: float | None, about: dict[str, str]
) -> list[dict[str, Any]]:
    """Rows of one case: the slowest rank of every round, then percentiles; ratios only where all variants are right."""
    first, ranks = timed_G[0], len(timed_G)
    base = {"case": f"ranks_{first.case}", "ranks": ranks, "tokens": sizes.tokens, **about}
    rows: list[dict[str, Any]] = [
        {**base, "variant": name, "mode": "skipped", "correct": True, "reason": reason}
        for name, reason in first.skipped.items()
    ]
    for name, error in first.error.items():
        known = {**base, "variant": name, "correct": error is None, "error": error}
        modes = [mode for variant, mode in first.us if variant == name]
        if not modes:
            rows.append({**known, "mode": "dry_run" if not sizes.rounds else "not_timed"})
        for mode in modes:
            slowest = [max(round_G) for round_G in zip(*(timed.us[name, mode] for timed in timed_G), strict=True)]
            rows.append({**known, "mode": f"eager_{mode}", **summary(slowest)})
    ours = {row["mode"]: row["p50_us"] for row in rows if row["variant"] == "ours" and "p50_us" in row}
    passes = {"srs": 1, "sag": 1, "srs_sag": 2}.get(first.case, 0)
    crossed = passes * sizes.tokens * sizes.hidden * sizes.dtype.itemsize * (ranks - 1) / ranks
    for row in rows if all(row["correct"] for row in rows) else ():
        if row["mode"] in ours:
            row["ours_speedup"] = row["p50_us"] / ours[row["mode"]]
        if crossed and link_gbps and "p50_us" in row:
            row["busbw_gbps"] = crossed / row["p50_us"] / 1e3
            row["link_share"] = row["busbw_gbps"] / link_gbps
    return rows


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
    """Device, driver, CUDA, NCCL, and clocks, power and temperature before."""
    if not torch.cuda.is_available():
        return {"gpu": None, "mode": "dry run on a CPU: correctness only"}
    mode = "CUDA graph, one GPU, virtual ranks: no link speed may be derived from them"
    return {**gpu_libraries(), "gpu_state_before": gpu_state(), "mode": mode}


def kernel_path(dry_run: bool) -> str:
    return "triton_interpreter" if dry_run else "triton"


def sentence(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    head = f"{row['case']:26} {row['variant']:20} {row['mode']:11}"
    if not row["correct"]:
        return f"{head} WRONG: {row['error']}"
    if row["mode"] == "skipped":
        return f"{head} {row['reason']}"
    if "p50_us" not in row:
        return f"{head} correct, not timed"
    text = f"{head} {row['p50_us']:9.1f} us (p10 {row['p10_us']:.1f}, p99 {row['p99_us']:.1f})"
    if "copy_share" in row:
        text += f", {row['copy_share']:.0%} of copy bandwidth"
    if "link_share" in row:
        text += f", {row['busbw_gbps']:.0f} GB/s bus, {row['link_share']:.0%} of a peer copy"
    if "ours_speedup" in row:
        text += f", ours {row['ours_speedup']:.2f}x as fast"
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
