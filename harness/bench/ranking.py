"""Token ranking on one CPU core: our counting pass against torch's argsort, bincount, cumsum, inverse.

    python -m harness.bench.ranking            part of make micro and make shuffle; a JSON line for each number of tokens

Both start from the same owners (later ranks liked up to twice as much) and end with perm, slot, counts and starts, which are
compared first; calls alternate in one run, the whole run is repeated. The kernel for GPUs is timed by make bench-gpu.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from semmoe.files import write_atomically

from ..environment import environment
from ..record import no_collection
from ..reference.ranking import TokenRanking, rank_tokens, rank_tokens_by_sort
from .rows import add_spread, summary, without_times

TOKENS, RANKS = (256, 1024, 4096, 16384), 8
ROUNDS, REPEATS, WARM_UPS = 300, 3, 5
Ranking = Callable[[torch.Tensor, int], TokenRanking]
VARIANTS: dict[str, Ranking] = {"one_pass": rank_tokens, "sort_pipeline": rank_tokens_by_sort}


def ranking_rows(
    tokens: Sequence[int] = TOKENS,
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    variants: dict[str, Ranking] = VARIANTS,
) -> list[dict[str, Any]]:
    """Rows with percentiles, `ours_speedup` (time over that of the first variant) and the spread of repeats; nothing is timed
    where results differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for repeat in range(repeats) for count in tokens for row in _rows(count, rounds, repeat, variants)]
    finally:
        torch.set_num_threads(threads)
    add_spread(rows)
    return rows


def _rows(tokens: int, rounds: int, repeat: int, variants: dict[str, Ranking]) -> list[dict[str, Any]]:
    liked_G = torch.linspace(1, 2, RANKS)
    owner_T = torch.multinomial(liked_G, tokens, replacement=True, generator=torch.Generator().manual_seed(repeat))
    base: dict[str, Any] = {"case": "rank_tokens", "ranks": RANKS, "tokens": tokens, "repeat": repeat}
    wanted = _fields(rank_tokens_by_sort(owner_T, RANKS))
    wrong = [name for name, rank in variants.items() if not torch.equal(_fields(rank(owner_T, RANKS)), wanted)]
    if wrong:
        return [{**base, "variant": name, "mode": "not_timed", "correct": name not in wrong} for name in variants]
    times_us: dict[str, list[float]] = {name: [] for name in variants}
    with no_collection():
        for turn in range(-WARM_UPS, rounds):
            for name, rank in variants.items():
                start = perf_counter_ns()
                rank(owner_T, RANKS)
                took_us = (perf_counter_ns() - start) / 1e3
                if turn >= 0:
                    times_us[name].append(took_us)
    made = [
        {**base, "variant": name, "mode": "eager_warm", "correct": True, **summary(us)} for name, us in times_us.items()
    ]
    ours_us = made[0]["p50_us"]
    return [{**row, "ours_speedup": row["p50_us"] / ours_us} for row in made]


def _fields(ranking: TokenRanking) -> torch.Tensor:
    return torch.cat([ranking.perm_T, ranking.slot_T, ranking.counts_on_device_G, ranking.starts_on_device_G])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.ranking", description="Time token ranking on one CPU core."
    )
    parser.add_argument("--out", type=Path, default=Path("results/runs/micro/token_ranking.jsonl"))
    chosen = parser.parse_args(argv)
    rows, about = ranking_rows(), environment(1, "one CPU core")
    lines = [json.dumps({**without_times(row), "environment": about}) + "\n" for row in rows]
    write_atomically(chosen.out, "".join(lines))
    for row in rows:
        if "ours_speedup" in row and row["variant"] == "sort_pipeline":
            print(f"{row['tokens']} tokens: sort pipeline {row['p50_us']:.1f} us, {row['ours_speedup']:.2f} x one pass")
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
