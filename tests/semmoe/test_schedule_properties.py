"""What must hold for every request and token scheduler in conf, on random small cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import make_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_problems import problem

from semmoe.config import group_options
from semmoe.placement.base import Placement
from semmoe.placement.random import Random
from semmoe.schedule.base import RankStates, assign_all, capacity_of
from semmoe.schedule.semantic_request import rooms
from semmoe.serving import Request
from semmoe.trials import Policy

TOKENS = group_options("token_scheduler")
REQUESTS = group_options("request_scheduler")
# These choose by the number of a rank, so that other numbers give other homes. All others look at scores and loads and
# at the number only where two ranks are equal in them, which random scores never are.
BY_NUMBER = {"none", "sort_cut", "round_robin", "random", "power_of_two"}
WITHIN_ROOMS = {"windowed", "oracle", "semantic", "netmoe"}  # water-filled to one level, plus their slack
EVEN = {"round_robin", "mask"}  # every G requests in a row cover all ranks, whatever their loads
RANKS = 4
SAME = np.arange(RANKS)
TRACE = make_trace(requests=12, tokens=8, layers=2, experts=8, k=2, vocab=12)
PROBLEM = problem(TRACE, RANKS)
quick = settings(max_examples=6, deadline=None)


def within_nodes(rng: np.random.Generator) -> np.ndarray:
    """New number of every rank; two nodes of two ranks keep theirs."""
    return np.concatenate([rng.permutation(2), 2 + rng.permutation(2)])


@pytest.mark.parametrize("option", TOKENS)
@given(
    seed=st.integers(0, 2**16), tokens=st.integers(0, 60), ranks=st.integers(1, 6), cap=st.sampled_from([1.0, 1.1, 2.0])
)
@quick
def test_every_token_has_one_home_within_the_capacity_and_calls_agree(
    option: str, seed: int, tokens: int, ranks: int, cap: float
) -> None:
    score_TG = np.random.default_rng(seed).integers(0, 5, (tokens, ranks)).astype(np.int32)  # many ties
    capacity = capacity_of(tokens, ranks, cap)
    plan, again = (Policy(option).make("token_scheduler").homes(score_TG, capacity) for _ in range(2))
    assert np.array_equal(np.bincount(plan.owner_T, minlength=ranks), plan.counts_G)
    assert len(plan.owner_T) == tokens and plan.counts_G.max(initial=0) <= capacity
    assert np.array_equal(np.sort(plan.perm_T), np.arange(tokens))
    assert np.array_equal(plan.perm_T[plan.starts_G[plan.owner_T] + plan.slot_T], np.arange(tokens))
    assert np.array_equal(plan.owner_T, again.owner_T)


@pytest.mark.parametrize("option", [name for name in TOKENS if name not in BY_NUMBER])
@given(seed=st.integers(0, 2**16), tokens=st.integers(1, 60))
@quick
def test_homes_of_tokens_follow_the_numbers_of_the_ranks(option: str, seed: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    score_TG = rng.integers(0, 1 << 24, (tokens, RANKS)).astype(np.int32)
    new_of_G, capacity = within_nodes(rng), capacity_of(tokens, RANKS, 1.1)
    scheduler = Policy(option).make("token_scheduler")
    before = scheduler.homes(score_TG, capacity).owner_T
    after = scheduler.homes(np.ascontiguousarray(score_TG[:, np.argsort(new_of_G)]), capacity).owner_T
    assert np.array_equal(after, new_of_G[before])  # so LAR, fan-out and loads are those of before


class Window:
    """R requests that wait at ranks with some load, and what is known of them."""

    def __init__(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        self.requests = [Request(r, 0.0, int(rng.integers(1, 400)), 8) for r in range(count)]
        self.score_RG = rng.integers(0, 1 << 30, (count, RANKS))
        self.heads = [rng.integers(0, 9, (2, 8)) for _ in range(count)]
        self.load_GS = np.column_stack([rng.integers(0, most, RANKS) for most in (10**6, 4, 4, 10**6)])

    def ranks(self, option: str, new_of_G: np.ndarray = SAME, idle: bool = False) -> np.ndarray:
        """Rank of every request by a fresh scheduler, where rank g has become new_of_G[g]."""
        scheduler: Any = Policy(option, {"ranks_per_node": 2} if option == "netmoe" else {}).make("request_scheduler")
        old_of_G = np.argsort(new_of_G)
        blocks_LGS = Random().place(PROBLEM).physical_to_logical_LP.reshape(2, RANKS, -1)
        placement = Placement(blocks_LGS[:, old_of_G].reshape(2, -1), RANKS, PROBLEM.layer_ids, 8)
        if hasattr(scheduler, "fit"):
            scheduler.fit(PROBLEM.profile, placement)
        load_GS = np.zeros_like(self.load_GS) if idle else self.load_GS[old_of_G]
        states = RankStates(*load_GS.T, kv_capacity=1 << 40)
        return np.array(assign_all(scheduler, self.requests, self.score_RG[:, old_of_G], states, self.heads))


@pytest.mark.parametrize("option", REQUESTS)
@given(seed=st.integers(0, 2**16), count=st.integers(1, 40))
@quick
def test_every_request_gets_one_rank_and_seeds_reproduce(option: str, seed: int, count: int) -> None:
    window = Window(seed, count)
    rank_R = window.ranks(option)
    assert rank_R.shape == (count,) and rank_R.min() >= 0 and rank_R.max() < RANKS
    assert np.array_equal(rank_R, window.ranks(option))


@pytest.mark.parametrize("option", sorted(WITHIN_ROOMS | EVEN))
@given(seed=st.integers(0, 2**16), count=st.integers(1, 40))
@quick
def test_requests_keep_the_share_that_their_scheduler_promises(option: str, seed: int, count: int) -> None:
    window = Window(seed, count)
    if option in EVEN:
        taken_G = np.bincount(window.ranks(option, idle=True), minlength=RANKS)
        assert taken_G.max() <= -(-count // RANKS)
        return
    load_G = window.load_GS[:, 1] + window.load_GS[:, 2]
    slack = getattr(Policy(option).make("request_scheduler"), "slack", 0.0)
    assert (np.bincount(window.ranks(option), minlength=RANKS) <= rooms(load_G.astype(float), count, slack)).all()


@pytest.mark.parametrize("option", [name for name in REQUESTS if name not in BY_NUMBER])
@given(seed=st.integers(0, 2**16), count=st.integers(1, 40))
@quick
def test_ranks_of_requests_follow_the_numbers_of_the_ranks(option: str, seed: int, count: int) -> None:
    window, new_of_G = Window(seed, count), within_nodes(np.random.default_rng(seed))
    assert np.array_equal(window.ranks(option, new_of_G), new_of_G[window.ranks(option)])


@pytest.mark.parametrize("option", sorted(BY_NUMBER & {*REQUESTS}))
def test_those_that_choose_by_number_do_not_so_the_test_above_can_fail(option: str) -> None:
    reverse = np.arange(RANKS)[::-1].copy()
    windows = [Window(seed, 20) for seed in range(5)]
    assert any(not np.array_equal(w.ranks(option, reverse), reverse[w.ranks(option)]) for w in windows)
