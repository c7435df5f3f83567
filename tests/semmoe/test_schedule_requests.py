"""Request schedulers beyond the basic ones, and the decision trace."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.decisions import Traced, token_decisions
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.profile import Profile
from semmoe.schedule.base import RankStates, assign_all
from semmoe.schedule.eldr import Eldr
from semmoe.schedule.mask import Mask
from semmoe.schedule.netmoe import NetMoe
from semmoe.schedule.power_of_two import PowerOfTwo
from semmoe.schedule.random import Random
from semmoe.schedule.semantic import Semantic
from semmoe.schedule.windowed import UNIT, Windowed
from semmoe.serving import Request
from semmoe.sources.synthetic import Synthetic


def states(
    ranks: int, running: list[int] | None = None, kv: list[int] | None = None, capacity: int = 10**9
) -> RankStates:
    zero = np.zeros(ranks, dtype=np.int64)
    return RankStates(zero, np.array(running or zero), zero, np.array(kv or zero), capacity)


def requests(count: int, prompt: int = 100) -> list[Request]:
    return [Request(i, 0.0, prompt, 10) for i in range(count)]


def test_random_is_seeded_and_covers_the_ranks() -> None:
    first, again = (assign_all(Random(3), requests(60), None, states(4)) for _ in range(2))
    assert first == again and set(first) == {0, 1, 2, 3}
    assert first != assign_all(Random(4), requests(60), None, states(4))


def test_power_of_two_is_more_even_than_random() -> None:
    def spread(scheduler: object) -> int:
        counts = np.bincount(assign_all(scheduler, requests(400), None, states(8)), minlength=8)  # type: ignore[arg-type]
        return int(counts.max() - counts.min())

    assert spread(PowerOfTwo(0)) <= 5 < spread(Random(0))
    assert PowerOfTwo(0).assign(requests(1)[0], None, None, states(1)) == 0


def test_mask_covers_all_ranks_in_every_round() -> None:
    score = np.random.default_rng(0).integers(0, 100, (12, 4))
    chosen = assign_all(Mask(), requests(12), score, states(4))
    for round_ in range(3):
        assert sorted(chosen[4 * round_ : 4 * round_ + 4]) == [0, 1, 2, 3]
    assert chosen[0] == score[0].argmax()


def test_windowed_is_the_best_of_all_assignments_within_the_rooms() -> None:
    rng = np.random.default_rng(0)
    for slack in (0.0, 1.0):
        scheduler = Windowed(slack=slack, load_weight=0.05)
        for _ in range(10):
            ranks = states(3, running=rng.integers(0, 3, 3).tolist())
            score = rng.integers(1, 10**6, (5, 3))
            value, rooms = scheduler.window_values(requests(5), score, ranks), scheduler.rooms(requests(5), ranks)
            chosen = np.array(assign_all(scheduler, requests(5), score, ranks))
            best = max(
                value[np.arange(5), list(owner)].sum()
                for owner in itertools.product(range(3), repeat=5)
                if (np.bincount(owner, minlength=3) <= rooms).all()
            )
            assert value[np.arange(5), chosen].sum() == pytest.approx(best, abs=5 / UNIT)


def test_windowed_minds_kv_pressure_and_prefix_hits() -> None:
    one, score = requests(1), np.array([[60, 40]])
    assert Windowed().assign(one[0], score[0], None, states(2)) == 0
    assert Windowed().assign(one[0], score[0], None, states(2, kv=[950, 0], capacity=1000)) == 1  # would not fit
    assert Windowed(kv_weight=2).assign(one[0], score[0], None, states(2, kv=[9500, 0], capacity=10000)) == 1
    hits = RankStates(*(np.zeros(2, dtype=np.int64),) * 4, 10**6, prefix_hit_tokens_RG=np.array([[0, 80]]))
    assert assign_all(Windowed(), one, score, hits) == [1]
    assert assign_all(Windowed(prefix_weight=0), one, score, hits) == [0]


def test_smaller_windows_see_the_ones_before_them() -> None:
    score = np.tile([9, 1], (8, 1))
    chosen = assign_all(Windowed(slack=0, window=2), requests(8), score, states(2))
    assert np.bincount(chosen).tolist() == [4, 4]


def test_netmoe_gives_equal_shares_and_decides_nodes_first() -> None:
    score = np.array([[9, 0, 5, 5], [9, 0, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]])
    assert assign_all(NetMoe(ranks_per_node=2), requests(4), score, states(4)) == [1, 0, 2, 3]
    chosen = assign_all(NetMoe(), requests(12), np.random.default_rng(0).integers(0, 9, (12, 4)), states(4))
    assert np.bincount(chosen, minlength=4).tolist() == [3, 3, 3, 3]
    with pytest.raises(UserError, match="does not divide 4 ranks"):
        assign_all(NetMoe(ranks_per_node=3), requests(4), score, states(4))


def test_eldr_sends_a_topic_to_its_rank_and_the_least_loaded_within_the_band() -> None:
    trace = Synthetic(
        requests=24, prompt_len=60, output_len=5, num_experts=16, top_k=3, layers=3, groups=4, topics=4, vocab_size=100
    ).make()
    profile = Profile.fit(trace)
    placement = Placement.from_ranks(np.tile(np.arange(16) // 4, (3, 1)), 4, (0, 1, 2))
    strict, wide = Eldr(band=0.0), Eldr(band=9.0)
    for scheduler in (strict, wide):
        scheduler.fit(profile, placement)
    counts = np.stack([profile.request_counts_RE(layer) for layer in range(3)], axis=1)
    homes = [strict.assign(requests(1)[0], None, counts[r], states(4)) for r in range(24)]
    like = np.stack([strict.centroid_GD @ strict.signature(c) for c in counts])
    assert homes == like.argmax(axis=1).tolist()
    assert wide.assign(requests(1)[0], None, counts[0], states(4, running=[3, 2, 0, 1])) == 2
    with pytest.raises(UserError, match="needs measured expert counts"):
        strict.assign(requests(1)[0], None, None, states(4))


def test_a_window_of_256_requests_on_8_ranks_takes_under_2_ms() -> None:
    score = np.random.default_rng(0).integers(0, 10**9, (256, 8))
    scheduler, best = Windowed(slack=0), np.inf
    scheduler.assign_window(requests(256), score, None, states(8))
    for _ in range(10):
        start = time.perf_counter()
        scheduler.assign_window(requests(256), score, None, states(8))
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3


def test_the_trace_changes_no_decision_and_prices_the_runner_up(tmp_path: Path) -> None:
    score = np.array([[10, 9], [10, 0]])
    for scheduler in (Mask, lambda: Windowed(slack=0), lambda: NetMoe()):
        traced = Traced(scheduler(), tmp_path / "d.jsonl")
        assert assign_all(traced, requests(2), score, states(2)) == assign_all(
            scheduler(), requests(2), score, states(2)
        )
        lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
        assert [line["rank"] for line in lines] == [d.rank for d in traced.decisions]
    masked = Traced(Mask())
    assign_all(masked, requests(2), score, states(2))
    assert masked.decisions[0].runner_up == 1 and masked.decisions[0].cost == 1
    assert masked.decisions[1].value_G == (None, 0.0) and masked.decisions[1].runner_up is None
    whole = Traced(Windowed(slack=0))
    assert assign_all(whole, requests(2), score, states(2)) == [1, 0]
    # request 0 forced to rank 0 drives request 1 to rank 1: both change
    assert whole.decisions[0].cost == pytest.approx((9 / 19 + 1) - (10 / 19 + 0))


def test_token_decisions_price_the_second_rank() -> None:
    score = np.array([[9, 1], [8, 7], [5, 0]], dtype=np.int32)
    decisions = token_decisions(score, Semantic().homes(score, 2))
    assert [(d.rank, d.runner_up, d.cost) for d in decisions] == [(0, 1, 8.0), (1, 0, -1.0), (0, 1, 5.0)]


def test_decisions_of_served_requests_are_written_when_asked_for(tmp_path: Path) -> None:
    overrides = ["workload=serve", "flow=dp", "request_scheduler=windowed", "placement=contiguous", "planned_folds=0"]
    overrides += ["workload.num_requests=6", f"results_dir={tmp_path}"]
    for wanted, lines in (("false", None), ("true", 6)):
        (config,) = compose_all([*overrides, f"decisions={wanted}"])
        run = RunBuilder().build(config)
        loop = run.serving_loop()
        for request in loop.requests:
            loop.submit(request, request.arrival_ms)
        loop.next_step(loop.requests[-1].arrival_ms)
        written = list(tmp_path.glob("*/decisions/*.jsonl"))
        assert [len(file.read_text().splitlines()) for file in written] == ([] if lines is None else [lines])
