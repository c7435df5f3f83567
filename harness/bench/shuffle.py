"""SRS, SAG and the exchange over shared memory against gloo, and token ranking against torch's pipeline, as a page.

    python -m harness.bench.shuffle            make shuffle; results/shuffle.md, raw times beside it

All variants of a case start and end with the same tensors, are checked first in poisoned memory and then called in turn
(ranks.py); the slowest rank of each call counts. The whole run is repeated with new ranks. Where any variant of a case is
wrong there is no ratio of that case, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from semmoe.files import write_atomically
from semmoe.rows import commit

from ..environment import environment
from ..pool import RankPool
from .ranking import ranking_rows
from .ranks import RankSizes, bench_ranks
from .rows import PERCENTILES, add_spread, raw_times, timed_rows

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 4, (16, 128, 1024), 2048, 64, 6
ROUNDS, REPEATS = 40, 3
Row = dict[str, Any]


def shuffle_rows(tokens: Sequence[int] = TOKENS, rounds: int = ROUNDS, repeats: int = REPEATS) -> list[Row]:
    """Rows of every case, variant, size and repeat, with the spread of repeats."""
    rows: list[Row] = []
    for repeat in range(repeats):
        with RankPool(RANKS) as pool:
            for count in tokens:
                sizes = RankSizes(count, HIDDEN, EXPERTS, TOP_K, torch.float32, "shared", "torch", rounds)
                for timed_G in zip(*pool.run(bench_ranks, sizes), strict=True):
                    made = timed_rows(timed_G, sizes, None, {"transport": "shared", "kernel_path": "torch"})
                    rows += [{**row, "repeat": repeat} for row in made if row["mode"] != "skipped"]
    add_spread(rows)
    return rows


def document(rows: Sequence[Row], about: dict[str, Any], command: str) -> str:
    """The Markdown page: every case by tokens and variant, means over the runs."""
    lines = ["# SRS + SAG and the exchange over shared memory against gloo, token ranking against torch", ""]
    lines += [
        f"Made by `{command}` (`harness/bench/shuffle.py`) on {about['cores']} cores of {about['cpu']}, torch",
        f"{about['torch']}, commit {about['commit']}, load {about['load_1min']} before it began; raw: `shuffle.times.jsonl`.",
        "",
        f"{RANKS} processes, fp32 rows of {HIDDEN:,}, equal counts, random permutation, {EXPERTS} experts, top-{TOP_K}.",
        "All variants of a case start and end with the same tensors, are checked first and then called in turn. Microseconds",
        "of the slowest rank of each call, percentiles of a run, mean over the runs. Other work shares these cores: ratios to",
        "ours count, not times. **No link speed follows from them.**",
        "",
        "`plain` is gloo's reduce-scatter + all-gather without the permutation (bar: ours no slower), `unfused` adds the",
        "indexing, `ours` of `exchange` is a2a_dedup. `rank_tokens`: one core, 8 ranks, one counting pass against torch's",
        "argsort, bincount, cumsum, inverse (bar at 4,096 tokens: 1.2 x).",
        "",
    ]
    head = f"| tokens | variant | {' | '.join(f'p{p}' for p in PERCENTILES)} | over ours | spread % |"
    for case in dict.fromkeys(row["case"] for row in rows):
        lines += [f"## {case.removeprefix('ranks_')}", "", head, "|" + " --- |" * (4 + len(PERCENTILES))]
        same: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in rows:
            if row["case"] == case:
                same[row["tokens"], row["variant"]].append(row)
        lines += [_line(count, variant, runs) for (count, variant), runs in same.items()]
        lines.append("")
    return "\n".join(lines)


def _line(tokens: int, variant: str, runs: Sequence[Row]) -> str:
    wrong = [row for row in runs if "p50_us" not in row]
    if wrong:
        cells = ["not timed" if wrong[0]["correct"] else "WRONG", *[""] * (len(PERCENTILES) + 1)]
        return f"| {tokens} | {variant} | {' | '.join(cells)} |"
    cells = [f"{mean(row[f'p{p}_us'] for row in runs):.0f}" for p in PERCENTILES]
    ratios = [row["ours_speedup"] for row in runs if "ours_speedup" in row]
    spread = runs[0].get("p50_spread")
    cells += [f"{mean(ratios):.2f}" if ratios else "-", "-" if spread is None else f"{100 * spread:.0f}"]
    return f"| {tokens} | {variant} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.shuffle",
        description="Time shuffle, exchange and token ranking on CPU ranks; write the page.",
    )
    parser.add_argument("--out", type=Path, default=Path("results/shuffle.md"))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of every variant")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of the whole run")
    chosen = parser.parse_args(argv)
    if min(chosen.rounds, chosen.repeats) < 1:
        parser.error("at least one round and one repeat are needed")
    about = environment(RANKS) | {"commit": commit()}
    rows = shuffle_rows(rounds=chosen.rounds, repeats=chosen.repeats) + ranking_rows(repeats=chosen.repeats)
    write_atomically(chosen.out, document(rows, about, "make shuffle"))
    raw = "".join(json.dumps(raw_times(row)) + "\n" for row in rows if "times_us" in row)
    write_atomically(chosen.out.with_suffix(".times.jsonl"), raw)
    print(f"written: {chosen.out}")
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
