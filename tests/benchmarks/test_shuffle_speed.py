"""SRS + SAG and the exchange in plain torch against gloo's calls, from the same tensors to the same tensors.

    make bench      or      python -m pytest tests/benchmarks/test_shuffle_speed.py --benchmark-enable -s

4 processes, fp32 rows of 2,048 (harness/bench/ranks.py): calls interleaved in one run, the slowest rank of each call,
medians compared. "plain" is gloo's reduce-scatter + all-gather without the permutation, which is the bar.
"""

from __future__ import annotations

from statistics import median

import pytest

pytest.importorskip("torch")

import torch

from harness.bench.ranks import RankSizes, Timed, bench_ranks
from harness.pool import RankPool

RANKS, SIZES, ROUNDS = 4, (16, 128, 1024), 40
FLOOR = 1.0  # the bar: no slower


def sizes_of(tokens: int, rounds: int) -> RankSizes:
    return RankSizes(tokens, 2048, 64, 6, torch.float32, "shared", "torch", rounds)


def medians_us(timed_G: tuple[Timed, ...]) -> dict[str, float]:
    """Of the slowest rank of each round, the first three rounds left out."""
    slowest = {
        name: [max(us) for us in zip(*(t.us[name, "eager_warm"] for t in timed_G), strict=True)]
        for name in timed_G[0].error
    }
    return {name: median(us[3:]) for name, us in slowest.items()}


def test_the_twin_over_shared_memory_is_no_slower_than_gloo(benchmark):
    with RankPool(RANKS) as pool:
        if benchmark.disabled:
            for timed in pool.run(bench_ranks, sizes_of(SIZES[0], 0))[0]:
                assert not any(timed.error.values())
            return
        ratios = {}
        for tokens in SIZES:
            for timed_G in zip(*pool.run(bench_ranks, sizes_of(tokens, ROUNDS)), strict=True):
                assert not any(timed_G[0].error.values())
                us = medians_us(timed_G)
                text = ", ".join(f"{name} {value:.0f} us ({value / us['ours']:.2f}x)" for name, value in us.items())
                print(f"\n{tokens} tokens: {timed_G[0].case}: {text}")
                if "plain" in us:
                    ratios[tokens] = us["plain"] / us["ours"]
        benchmark.pedantic(pool.run, args=(bench_ranks, sizes_of(SIZES[1], 1)), rounds=3)
    benchmark.extra_info |= {f"ratio_{tokens}_tokens": ratio for tokens, ratio in ratios.items()}
    assert min(ratios.values()) >= FLOOR
