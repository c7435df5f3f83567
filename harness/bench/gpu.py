"""One command that checks, times and writes rows on one GPU, all ranks virtual.

    python -m harness.bench.gpu              make bench-gpu; rows in results/gpu.jsonl
    python -m harness.bench.gpu --dry-run    on a CPU: every case checked on small sizes, nothing timed

With two GPUs or more, shuffle and exchange between them are checked and timed too (ranks.py), against NCCL's calls
and torch's symmetric-memory operators; with one, a row says why not.

Every variant is checked against the reference first, outputs filled with NaN, of which rows that nobody uses must be left;
then it is captured in a CUDA graph, which is replayed 1,000 times with warm caches and 100 times after a flush of 256 MB, and
called 100 times without a graph, host included; the last results are checked again. Where any variant of a case is wrong, no
ratio of that case is printed and the command fails.

The whole run is repeated (--repeats, 2: new buffers, captures and ranks each time), clocks, power and temperature are read
before and after each; rows carry the spread of the repeats. One JSON line a row (rows.py): modes graph_warm, graph_cold,
eager_warm, between GPUs eager_cold too, dry_run, skipped, not_timed. The times of every iteration lie beside (.times.jsonl).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.files import write_atomically
from semmoe.rows import commit

from ..device.clock import SLEEP_CYCLES, warm_up
from ..environment import environment, gpu_libraries, gpu_state
from ..transport.symmetric_checks import no_gpu_reason
from .rows import add_ratios, add_spread, between, raw_times, sentence, summary, timed_rows, without_times

if TYPE_CHECKING:
    from .cases import Case

FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
REPLAYS = {"graph_warm": 1000, "graph_cold": 100}
EAGER = 100
SLEPT = 100  # replays that the host launches within one sleep of the device
MOST_RANKS, RANK_TOKENS, RANK_ROUNDS = 8, (128, 4096), 100  # between GPUs


def bench(out: Path, dry_run: bool, repeats: int = 2) -> int:
    """Write the rows; 0 when every variant was correct, else 1. UserError without a GPU, unless `dry_run` (one repeat)."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, just below
    elif not torch.cuda.is_available():
        raise UserError(f"it needs a CUDA device ({no_gpu_reason()}); --dry-run checks every case on a CPU")
    rows: list[dict[str, Any]] = []
    for repeat in range(1 if dry_run else repeats):
        rows += [{**row, "repeat": repeat} for row in whole_run(dry_run)]
    add_spread(rows)
    wrong = sum(not row["correct"] for row in rows)
    spreads = [row["p50_spread"] for row in rows if "p50_spread" in row]
    write_atomically(out, "".join(json.dumps(without_times(row)) + "\n" for row in rows))
    if spreads:
        raw = [json.dumps(raw_times(row)) + "\n" for row in rows if "times_us" in row]
        write_atomically(out.with_suffix(".times.jsonl"), "".join(raw))
        print(f"medians of {repeats} repeats spread by {median(spreads):.1%} in the median, {max(spreads):.1%} at most")
    print(f"{len(rows)} rows in {out}" + (f"; {wrong} wrong" if wrong else ""))
    return 1 if wrong else 0


def whole_run(dry_run: bool) -> list[dict[str, Any]]:
    """Every row once, said as soon as it is known, each with the environment: the state of the GPUs before and after all of
    them. A case that cannot be made or timed is a row that says why, and the others go on."""
    from . import cases as bench_cases

    sizes = bench_cases.DRY if dry_run else bench_cases.FULL
    about = {
        **environment(sizes.ranks),
        **gpu_environment(),
        "commit": commit(),
        "seed": bench_cases.SEED,
        "transport": "virtual",
        "kernel_path": kernel_path(dry_run),
    }
    copy_gbps = None if dry_run else copy_bandwidth_gbps()
    rows: list[dict[str, Any]] = []

    def keep(made: Iterable[dict[str, Any]]) -> None:
        for row in made:
            rows.append({"environment": about | between(row), **row})
            print(sentence(row), flush=True)

    for name, make in bench_cases.makers(sizes).items():
        try:
            for case in make():
                keep({"copy_gbps": copy_gbps, **row} for row in run_case(case, copy_gbps))
        except Exception as error:  # its kernels or memory; whatever is wrong with the device shows in the next one too
            keep([{"case": name, "variant": "-", "mode": "not_timed", "correct": False, "error": first_line(error)}])
    if not dry_run:
        torch.cuda.empty_cache()  # rank 0 shares this GPU
    try:
        keep(rank_rows(dry_run))
    except Exception as error:
        keep(
            [
                {
                    "case": "between_ranks",
                    "variant": "-",
                    "mode": "not_timed",
                    "correct": False,
                    "error": first_line(error),
                }
            ]
        )
    after = [] if dry_run else gpu_state()
    for row in rows:
        row["environment"]["gpu_state_after"] = after
    return rows


def run_case(case: Case, copy_gbps: float | None) -> list[dict[str, Any]]:
    """Check every variant, then time every one; ratios only if all are correct. copy_gbps None: nothing is timed."""
    errors = {name: failure(partial(case.check, name)) for name in case.variants}
    rows = []
    for name, run in case.variants.items():
        base = {"case": case.name, "variant": name, "correct": errors[name] is None, "error": errors[name]}
        if copy_gbps is None or errors[name] is not None:
            rows.append({**base, "mode": "dry_run" if copy_gbps is None else "not_timed"})
            continue
        reason = case.uncapturable.get(name)
        times_us, results = graph_times(run, captured=reason is None)
        after = failure(partial(case.verify, name, results))
        base |= {"correct": after is None, "error": after}
        rows += [{**base, "mode": mode, **summary(times)} for mode, times in times_us.items()]
        if reason is not None:
            rows += [{**base, "mode": mode, "reason": reason} for mode in REPLAYS]
    if all(row["correct"] for row in rows):
        add_ratios(rows, case, copy_gbps)
    return rows


def rank_rows(dry_run: bool, gpus: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of real ranks: one a GPU, where there are two or more; two CPU processes in a dry run. gpus: as if so many."""
    from ..pool import RankPool
    from .ranks import RankSizes, bench_ranks

    ranks = 2 if dry_run else min(torch.cuda.device_count() if gpus is None else gpus, MOST_RANKS)
    about = (
        {"transport": "shared", "kernel_path": "torch"}
        if dry_run
        else {"transport": "symmetric", "kernel_path": "triton"}
    )
    if ranks < 2:
        reason = "shuffle and exchange between ranks need two GPUs or more, this machine has one"
        yield {"case": "between_ranks", "variant": "-", "mode": "skipped", "correct": True, "reason": reason, **about}
        return
    dry = RankSizes(24, 32, 8, 2, torch.float32, "shared", "torch", rounds=0)
    full = [RankSizes(t, 2048, 128, 8, torch.bfloat16, "symmetric", "triton", RANK_ROUNDS) for t in RANK_TOKENS]
    with RankPool(ranks, timeout_s=300.0) as pool:
        link_gbps = None
        if not dry_run:
            from ..links import peer_copy_gbps  # needs pandas, one GPU does not

            link_gbps = min(pool.run(peer_copy_gbps, COPY_BYTES))
        for sizes in [dry] if dry_run else full:
            for timed_G in zip(*pool.run(bench_ranks, sizes), strict=True):
                yield from timed_rows(timed_G, sizes, link_gbps, about)


def failure(check: Callable[[], None]) -> str | None:
    """The first line of what is wrong, or None. A variant that cannot run is as wrong as one whose results differ."""
    try:
        check()
    except AssertionError as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else "results differ"
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else 'no message'}"


def graph_times(
    run: Callable[[], Sequence[Tensor]], captured: bool = True
) -> tuple[dict[str, list[float]], Sequence[Tensor]]:
    """(microseconds of every iteration by mode, results of the last one). The capture holds one call of `run`; not captured:
    eager only.

    The device sleeps before every SLEPT iterations, so that launches are queued ahead of it; of "eager" ones it does not:
    there the host counts, as without a graph it does."""
    warm_up(run)
    times_us = {"eager_warm": [host_us(run) for _ in range(EAGER)]}
    if not captured:
        return times_us, run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for mode, replays in REPLAYS.items():
        times_us[mode] = replay_times(graph.replay, replays, flush.zero_ if mode == "graph_cold" else None)
    return times_us, results


def replay_times(
    replay: Callable[[], Any], replays: int, flush: Callable[[], Any] | None, cuda: Any = torch.cuda
) -> list[float]:
    """Microseconds of every replay, by events. cuda: torch.cuda, or what stands for it."""
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for at, (start, end) in enumerate(events):
        if at % SLEPT == 0:
            cuda.synchronize()
            cuda._sleep(SLEEP_CYCLES)
        if flush is not None:
            flush()
        start.record()
        replay()
        end.record()
    cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def host_us(run: Callable[[], Any]) -> float:
    """From an idle device to an idle device, launching included."""
    torch.cuda.synchronize()
    start = perf_counter_ns()
    run()
    torch.cuda.synchronize()
    return (perf_counter_ns() - start) / 1e3


def copy_bandwidth_gbps() -> float:
    """Bytes read and written a second by one large copy, median of 50."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    times_us, _ = graph_times(lambda: [b.copy_(a)])
    return 2 * COPY_BYTES / summary(times_us["graph_cold"])["p50_us"] / 1e3


def gpu_environment() -> dict[str, Any]:
    """Device, driver, CUDA, NCCL, and clocks, power and temperature before."""
    if not torch.cuda.is_available():
        return {"gpu": None, "mode": "dry run on a CPU: correctness only"}
    mode = "CUDA graph, one GPU, virtual ranks: no link speed may be derived from them"
    return {**gpu_libraries(), "gpu_state_before": gpu_state(), "mode": mode}


def kernel_path(dry_run: bool) -> str:
    return "triton_interpreter" if dry_run else "triton"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.gpu", description="Check and time every kernel on one GPU with virtual ranks."
    )
    parser.add_argument("--out", type=Path, help="default results/gpu.jsonl, dry runs results/runs/gpu_dry_run.jsonl")
    parser.add_argument("--repeats", type=int, default=2, help="of the whole run (default 2), for the spread")
    parser.add_argument("--dry-run", action="store_true", help="check every case on a CPU, time nothing")
    chosen = parser.parse_args(arguments)
    usual = Path("results/runs/gpu_dry_run.jsonl" if chosen.dry_run else "results/gpu.jsonl")
    if chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        return bench(chosen.out or usual, chosen.dry_run, chosen.repeats)
    except UserError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
