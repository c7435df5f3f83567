"""Token ranking on the CPU: one counting pass against torch's argsort, bincount, cumsum, inverse pipeline.

    make bench      or      python -m pytest tests/benchmarks/test_token_ranking_speed.py --benchmark-enable

4,096 tokens on 8 ranks, one thread; both in one run, calls interleaved, medians compared.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns

import pytest

pytest.importorskip("torch")

import torch

from harness.reference.ranking import rank_tokens, rank_tokens_by_sort

TOKENS, RANKS, ROUNDS = 4096, 8, 300
FLOOR = 1.2  # the bar


def test_one_pass_ranking_beats_the_sort_pipeline(benchmark):
    owner_T = torch.randint(0, RANKS, (TOKENS,), generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(rank_tokens(owner_T, RANKS).perm_T, rank_tokens_by_sort(owner_T, RANKS).perm_T)
        if benchmark.disabled:
            return
        benchmark(rank_tokens, owner_T, RANKS)
        times_ns = {rank_tokens: [], rank_tokens_by_sort: []}
        for _ in range(ROUNDS):
            for ranked, kept in times_ns.items():
                start = perf_counter_ns()
                ranked(owner_T, RANKS)
                kept.append(perf_counter_ns() - start)
    finally:
        torch.set_num_threads(threads)
    ours_us, torch_us = (median(kept) / 1e3 for kept in times_ns.values())
    benchmark.extra_info |= {"one_pass_us": ours_us, "sort_pipeline_us": torch_us, "ratio": torch_us / ours_us}
    print(f"\none pass {ours_us:.1f} us, sort pipeline {torch_us:.1f} us: {torch_us / ours_us:.2f}x")
    assert torch_us / ours_us >= FLOOR
