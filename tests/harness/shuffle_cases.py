"""The matrix of SRS and SAG: ranks, tokens and counts, with one input and one expected sum for every implementation."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from rank_processes import transport_of

from harness.transport.plan import ShufflePlan

RANKS, TOKENS, KINDS = (1, 2, 4, 8), (0, 1, 7, 64, 1000), ("free", "equal", "one")
SKEWED = (1, 20, 3, 0, 5, 1, 0, 9)
HIDDEN = 24


def matrix() -> list[tuple[int, int, str]]:
    """(ranks, tokens, kind of counts): free (any), equal (T / W each), one (all on the last rank), and SKEWED."""
    cases = [(w, t, kind) for w in RANKS for t in TOKENS for kind in KINDS if kind != "equal" or t % w == 0]
    return [*cases, (len(SKEWED), sum(SKEWED), "skewed")]


def sum_case(ranks: int, tokens: int, kind: str) -> tuple[ShufflePlan, torch.Tensor, torch.Tensor]:
    """(plan, X of every rank, their fp32 sum in rank order); homes in random order, so that a mixed-up direction shows."""
    rng = np.random.default_rng(tokens + ranks)
    if kind == "free":
        homes_T = rng.integers(0, ranks, tokens)
    else:
        counts = {"equal": [tokens // ranks] * ranks, "one": [0] * (ranks - 1) + [tokens], "skewed": SKEWED}[kind]
        homes_T = rng.permutation(np.repeat(np.arange(ranks), counts))
    plan = ShufflePlan.from_homes(homes_T, ranks)
    if tokens > 7 and max(plan.counts_G) < tokens:
        assert not torch.equal(plan.perm_T[plan.perm_T], torch.arange(tokens)), "an involution hides mistakes"
    x_GTH = torch.from_numpy(rng.standard_normal((ranks, tokens, HIDDEN), dtype=np.float32))
    expected_TH = torch.zeros(tokens, HIDDEN)
    for x_TH in x_GTH:
        expected_TH += x_TH
    return plan, x_GTH, expected_TH


def wrong_cases(transport: Any) -> list[str]:
    """Cases of this transport's number of ranks whose SAG(SRS(X)) or all-reduce is not the sum."""
    wrong = []
    for ranks, tokens, kind in matrix():
        if ranks != transport.ranks:
            continue
        plan, x_GTH, expected_TH = sum_case(ranks, tokens, kind)
        x_TH = x_GTH[transport.rank]
        if not torch.equal(transport.sag(transport.srs(x_TH, plan), plan), expected_TH):
            wrong.append(f"sag(srs) {ranks} {tokens} {kind}")
        if not torch.allclose(transport.all_reduce(x_TH), expected_TH, rtol=1e-6, atol=1e-6):
            wrong.append(f"all_reduce {ranks} {tokens} {kind}")
    return wrong


def wrong_on_process(name: str) -> list[str]:
    """The whole matrix on the processes of this run, 1, 2, 4 and 8 of them."""
    transports = [transport_of(name, ranks) for ranks in RANKS]
    return [text for transport in transports if transport is not None for text in wrong_cases(transport)]


def skewed_rounds(ranks: int, number: int, waiting: bool) -> int:
    """SRS, SAG rounds over shared memory with skewed counts and random delays; rounds with a wrong row on this rank.

    waiting False: the memory's barrier returns at once (negative control).
    """
    transport = transport_of("shared", ranks)
    if transport is None:
        return 0
    memory, late, wrong = transport.memory, random.Random(transport.rank), 0
    whole = memory.barrier
    if not waiting:
        memory.barrier = lambda: None
    for index in range(number):
        rng = np.random.default_rng(index)
        owner_T = np.minimum(rng.geometric(0.4, 39) - 1, ranks - 1) if index % 3 else np.full(39, index % ranks)
        plan = ShufflePlan.from_homes(rng.permutation(owner_T), ranks)
        x_GTH = torch.from_numpy(rng.standard_normal((ranks, 39, HIDDEN), dtype=np.float32))
        expected_TH = torch.zeros(39, HIDDEN)
        for x_TH in x_GTH:
            expected_TH += x_TH
        try:
            time.sleep(late.uniform(0, 0.004))
            rows = transport.srs(x_GTH[transport.rank], plan)
            time.sleep(late.uniform(0, 0.004))
            wrong += not torch.equal(transport.sag(rows, plan), expected_TH)
        except (IndexError, RuntimeError):  # what nobody waited for may not even have the right size
            if waiting:
                raise
            wrong += 1
    memory.barrier = whole
    memory.barrier()
    return wrong
