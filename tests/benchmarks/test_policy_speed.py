"""Time of the policies that run while requests wait: EPLB, a window of requests, an exact token plan.

    make bench      or      python -m pytest tests/benchmarks/test_policy_speed.py --benchmark-enable

CPU time of the process on one thread. The bars are those of issue 3; results/policy_speed.md holds measured figures.
Scores are skewed: ranks differ in popularity by a factor of three, so that capacities bind and tokens must move.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from semmoe.placement.eplb import rebalance
from semmoe.schedule.base import RankStates, assign_all, capacity_of
from semmoe.schedule.semantic import Semantic
from semmoe.schedule.windowed import Windowed
from semmoe.serving import Request

RANKS = 8


def skewed_scores(items: int) -> Any:
    """int32 fixed point: expected local assignments of top-8 routing, some ranks asked for more than others."""
    rng = np.random.default_rng(0)
    share = rng.gamma(0.5, np.linspace(0.5, 1.5, RANKS), (items, RANKS)) + 1e-3
    return np.rint(8 * (1 << 16) * share / share.sum(axis=1, keepdims=True)).astype(np.int32)


@pytest.mark.benchmark(timer=time.process_time)
def test_eplb_of_58_layers_x_256_experts_in_288_slots_on_32_ranks(benchmark: Any) -> None:
    """Bar: 0.1 s."""
    load = np.random.default_rng(0).lognormal(0, 1, (58, 256)) * 1000
    table = benchmark(rebalance, load, 288, 8, 4, 32)
    assert table.shape == (58, 288) and len(np.unique(table[0])) == 256


@pytest.mark.benchmark(timer=time.process_time)
def test_a_window_of_256_requests_on_8_ranks(benchmark: Any) -> None:
    """Bar: 2 ms."""
    requests = [Request(i, 0.0, 100 + i % 400, 64) for i in range(256)]
    zero = np.zeros(RANKS, dtype=np.int64)
    score_RG, idle = skewed_scores(256).astype(np.int64), RankStates(zero, zero, zero, zero, 1 << 30)
    owner_R = benchmark(lambda: assign_all(Windowed(), requests, score_RG, idle))
    assert np.bincount(owner_R, minlength=RANKS).max() <= 256 // RANKS + 1


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.benchmark(timer=time.process_time)
def test_an_exact_token_plan_on_8_ranks(benchmark: Any, tokens: int) -> None:
    """Bars: 0.5 ms for 512 tokens, 4 ms for 4,096; exactly equal homes, the hardest case."""
    score_TG, capacity = skewed_scores(tokens), capacity_of(tokens, RANKS, 1.0)
    plan = benchmark(Semantic().homes, score_TG, capacity)
    assert plan.counts_G.max() <= capacity
