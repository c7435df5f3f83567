"""Request schedulers and token schedulers."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.schedule.base import RankStates, assign_all, capacity_of
from semmoe.schedule.none import NoShuffle
from semmoe.schedule.round_robin import RoundRobin
from semmoe.schedule.semantic import Semantic
from semmoe.schedule.semantic_request import SemanticRequest, rooms
from semmoe.schedule.shortest_queue import ShortestQueue
from semmoe.serving import Request


def states(queued: list[int], running: list[int], waiting: list[int], kv: list[int]) -> RankStates:
    return RankStates(*(np.array(x) for x in (queued, running, waiting, kv)), kv_capacity=10**6)


def requests(count: int, prompt: int = 100) -> list[Request]:
    return [Request(i, 0.0, prompt, 10) for i in range(count)]


IDLE = states([0] * 3, [0] * 3, [0] * 3, [0] * 3)
ONE = requests(1)[0]


def test_no_shuffle_keeps_the_order_in_equal_chunks() -> None:
    plan = NoShuffle().homes(np.zeros((7, 3), dtype=np.int32), 3)
    assert plan.owner_T.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert plan.perm_T.tolist() == list(range(7))
    with pytest.raises(ValueError, match="do not fit"):
        NoShuffle().homes(np.zeros((7, 3), dtype=np.int32), 2)


def test_semantic_homes_raise_the_score_within_the_capacity() -> None:
    rng = np.random.default_rng(0)
    score = (rng.gumbel(size=(100, 4)) * 1000).astype(np.int32)
    capacity = capacity_of(100, 4, 1.1)
    plan, plain = Semantic().homes(score, capacity), NoShuffle().homes(score, capacity)
    rows = np.arange(100)
    assert plan.counts_G.max() <= capacity
    assert score[rows, plan.owner_T].sum() > score[rows, plain.owner_T].sum() + 50_000
    assert np.array_equal(plan.perm_T[plan.starts_G[plan.owner_T] + plan.slot_T], rows)
    assert len(Semantic().homes(score[:0], 0).owner_T) == 0


def test_round_robin_goes_on_between_windows() -> None:
    scheduler = RoundRobin()
    assert assign_all(scheduler, requests(4), None, IDLE) == [0, 1, 2, 0]
    assert assign_all(scheduler, requests(2), None, IDLE) == [1, 2]


def test_shortest_queue_counts_queued_and_cached_tokens() -> None:
    assert ShortestQueue().assign(ONE, None, None, states([50, 0, 0], [0] * 3, [0] * 3, [0, 60, 40])) == 2
    assert ShortestQueue().assign(ONE, None, None, states([0] * 3, [2, 1, 1], [0, 1, 0], [0] * 3)) == 2
    assert assign_all(ShortestQueue(), requests(3), None, IDLE) == [0, 1, 2]


def test_semantic_request_follows_the_score_until_the_slack_ends() -> None:
    score = np.array([5, 0, 9])
    busy = states([0] * 3, [1, 0, 1], [0, 0, 1], [0] * 3)  # loads 1, 0, 2
    assert SemanticRequest(slack=2).assign(ONE, score, None, busy) == 2
    assert SemanticRequest(slack=1).assign(ONE, score, None, busy) == 0
    assert SemanticRequest(slack=0).assign(ONE, score, None, busy) == 1
    assert SemanticRequest(slack=2).assign(ONE, None, None, busy) == 1


def test_semantic_request_by_tokens_counts_in_prompts() -> None:
    score = np.array([9, 0, 0])
    busy = states([150, 0, 0], [0] * 3, [0] * 3, [0] * 3)  # 1.5 prompts of 100
    assert SemanticRequest(slack=1, load="tokens").assign(ONE, score, None, busy) == 1
    assert SemanticRequest(slack=2, load="tokens").assign(ONE, score, None, busy) == 0


def test_a_window_is_assigned_exactly_where_one_by_one_loses() -> None:
    score_RG = np.array([[10, 9], [10, 0]])
    idle = states([0, 0], [0, 0], [0, 0], [0, 0])
    strict = SemanticRequest(slack=0)
    assert assign_all(strict, requests(2), score_RG, idle) == [1, 0]
    first = strict.assign(ONE, score_RG[0], None, idle)
    assert first == 0  # greedy takes rank 0 and leaves request 1 with nothing


def test_windows_stay_within_the_slack_over_many_rounds() -> None:
    rng = np.random.default_rng(0)
    for slack in (0.0, 1.0, 2.5):
        count_G = np.zeros(4, dtype=np.int64)
        for _ in range(20):
            window = int(rng.integers(1, 7))
            score = rng.integers(0, 2**40, size=(window, 4)) + (np.arange(4) == 0) * 2**41  # all prefer rank 0
            ranks = SemanticRequest(slack).assign_window(
                requests(window), score, None, states([0] * 4, count_G.tolist(), [0] * 4, [0] * 4)
            )
            count_G += np.bincount(ranks, minlength=4)
            assert count_G.max() <= np.ceil(count_G.mean() + slack)
    assert SemanticRequest().assign_window([], None, None, IDLE).shape == (0,)


def test_rooms_by_hand_hold_the_window() -> None:
    assert rooms(np.array([3.0, 0.0, 0.0]), 3, 0.0).tolist() == [0, 2, 2]
    assert rooms(np.array([0.0, 0.0]), 4, 1.0).tolist() == [3, 3]
    rng = np.random.default_rng(0)
    for _ in range(200):
        load_G, window = rng.random(int(rng.integers(1, 6))) * 9, int(rng.integers(0, 12))
        assert rooms(load_G, window, 0.0).sum() >= window


def test_bad_parameters_are_named() -> None:
    with pytest.raises(UserError, match=r"request_scheduler\.slack=-1"):
        SemanticRequest(slack=-1)
    with pytest.raises(UserError, match=r"request_scheduler\.load='kv'"):
        SemanticRequest(load="kv")
