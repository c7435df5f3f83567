"""SRS + SAG in plain torch over shared memory against gloo's own reduce-scatter + all-gather at equal bytes.

    make bench      or      python -m pytest tests/benchmarks/test_shuffle_speed.py --benchmark-enable -s

4 processes, fp32 rows of 2,048, equal counts (gloo's calls know no others) under a random permutation; both in one run,
calls interleaved, the slowest rank of each call, medians compared.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from harness.pool import RankPool
from harness.transport.plan import ShufflePlan
from harness.transport.shared import SharedTransport
from harness.worker import RankContext

RANKS, HIDDEN, SIZES, ROUNDS = 4, 2048, (16, 128, 1024), 40
FLOOR = 1.0  # the bar: no slower


def interleaved(context: RankContext, tokens: int, rounds: int) -> list[list[int]]:
    """Nanoseconds of each round: ours, gloo's. Both start and end with the same tensors, checked first."""
    ranks, rank = context.ranks, context.rank
    if "shuffle" not in context.state:
        context.state["shuffle"] = SharedTransport(stage_bytes=max(SIZES) * HIDDEN * 4)
    transport = context.state["shuffle"]
    homes_T = np.random.default_rng(0).permutation(np.repeat(np.arange(ranks), tokens // ranks))
    plan = ShufflePlan.from_homes(homes_T, ranks)
    x_GTH = torch.randn(ranks, tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    x_TH, rows_nH, out_TH = x_GTH[rank], torch.empty(tokens // ranks, HIDDEN), torch.empty(tokens, HIDDEN)

    def ours() -> torch.Tensor:
        return transport.sag(transport.srs(x_TH, plan), plan)

    def gloo() -> torch.Tensor:
        dist.reduce_scatter_tensor(rows_nH, x_TH)
        dist.all_gather_into_tensor(out_TH, rows_nH)
        return out_TH

    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for gloo's two calls
    for variant in (ours, gloo):
        torch.testing.assert_close(variant(), x_GTH.sum(0), rtol=1e-5, atol=1e-5)
    return [[_timed(variant) for variant in (ours, gloo)] for _ in range(rounds)]


def _timed(call: Callable[[], torch.Tensor]) -> int:
    dist.barrier()
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def test_the_twin_over_shared_memory_is_no_slower_than_gloo(benchmark):
    with RankPool(RANKS) as pool:
        if benchmark.disabled:
            pool.run(interleaved, SIZES[0], 1)
            return
        ratios = {}
        for tokens in SIZES:
            slowest_R2 = np.array(pool.run(interleaved, tokens, ROUNDS)).max(axis=0)[3:]
            ours_us, gloo_us = (median(column) / 1e3 for column in slowest_R2.T)
            ratios[tokens] = gloo_us / ours_us
            print(f"\n{tokens} tokens: SRS + SAG {ours_us:.0f} us, gloo {gloo_us:.0f} us: {ratios[tokens]:.2f}x")
        benchmark.pedantic(pool.run, args=(interleaved, SIZES[1], 1), rounds=3)
    benchmark.extra_info |= {f"ratio_{tokens}_tokens": ratio for tokens, ratio in ratios.items()}
    assert min(ratios.values()) >= FLOOR
