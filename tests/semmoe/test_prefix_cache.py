"""Prefix cache: hits shorten the prefill on the rank that holds the prefix, only where prompts are declared equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_kit import drive

from semmoe.schedule.round_robin import RoundRobin
from semmoe.schedule.windowed import Windowed
from semmoe.serving import Request, ServingLimits, ServingLoop
from semmoe.serving.prefix_cache import PrefixCache
from semmoe.serving.workload import Workload

BLOCK = 4


def limits(kv_tokens=1000, batch=64, running=8):
    return ServingLimits(batch, running, kv_tokens, BLOCK)


def served(requests, queues=1, scheduler=None, **changes):
    loop = ServingLoop(requests, queues, limits(**changes), scheduler or RoundRobin())
    return loop, drive(loop)


def test_a_second_request_computes_only_what_follows_the_shared_prefix():
    requests = [Request(0, 0.0, 10, 2, prefix_ids=(1, 2)), Request(1, 9.0, 11, 2, prefix_ids=(1, 2))]
    loop, plans = served(requests)
    assert loop.hit_tokens_R.tolist() == [0, 8] and loop.prefix_hit_rate == 8 / 21
    assert [(p.start_N[0], p.count_N[0]) for p in plans if p.request_N[0] == 1] == [(8, 3), (11, 1)]


def test_the_last_prompt_token_is_always_computed():
    requests = [Request(i, 9.0 * i, 8, 1, prefix_ids=(1, 2)) for i in range(2)]
    assert served(requests)[0].hit_tokens_R.tolist() == [0, 4]


def test_a_prefix_held_by_another_rank_is_no_hit():
    requests = [Request(i, 9.0 * i, 9, 1, prefix_ids=(1, 2)) for i in range(4)]
    loop, _ = served(requests, queues=2)
    assert loop.rank_R.tolist() == [0, 1, 0, 1] and loop.hit_tokens_R.tolist() == [0, 0, 8, 8]


def test_the_windowed_scheduler_goes_to_the_rank_that_holds_the_prefix():
    requests = [Request(i, 9.0 * i, 9, 1, prefix_ids=(i % 2 * 2, i % 2 * 2 + 1)) for i in range(6)]
    loop, _ = served(requests, queues=2, scheduler=Windowed(slack=1.0))
    assert loop.hit_tokens_R.tolist() == [0, 0, 8, 8, 8, 8]
    unknown, _ = served([Request(r.id, r.arrival_ms, 9, 1) for r in requests], queues=2, scheduler=Windowed(slack=1.0))
    assert not unknown.hit_tokens_R.any()


def test_resampled_requests_never_count_as_hits(trace):
    work = Workload.sample(trace, 60, rate_rps=1e4)
    assert len(set(work.source_R.tolist())) < 60
    loop = ServingLoop(work.requests, 2, limits(), RoundRobin())
    drive(loop)
    assert loop.prefix_hit_rate == 0.0
    shared = ServingLoop(work.sharing(1, 8, BLOCK, 0).requests, 2, limits(), RoundRobin())
    drive(shared)
    assert shared.prefix_hit_rate > 0.5, "the control: declared prefixes do"


def test_no_blocks_no_cache():
    requests = [Request(i, 9.0 * i, 10, 1, prefix_ids=(1, 2)) for i in range(3)]
    loop = ServingLoop(requests, 1, ServingLimits(64, 8, 1000, 0))
    drive(loop)
    assert loop.prefix_hit_rate == 0.0


def test_least_recently_used_blocks_go_first_and_the_end_of_a_prefix_before_its_beginning():
    cache = PrefixCache(BLOCK)
    for block in (1, 2, 3, 9):
        cache.add(block)
    assert cache.release([9]) == BLOCK and cache.release([1, 2, 3]) == 3 * BLOCK
    assert cache.evict(1) == BLOCK and cache.hit_blocks([9], 100) == 0
    assert cache.evict(1) == BLOCK and cache.hit_blocks([1, 2, 3], 100) == 2
    assert cache.acquire([1, 2]) == 2 * BLOCK and cache.evict(100) == 0, "blocks in use stay"


prompts = st.lists(
    st.tuples(st.floats(0, 60), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(prompts, st.integers(1, 3), st.integers(3, 30), st.integers(44, 120))
def test_tokens_are_conserved_and_the_budget_kept_with_shared_prefixes(shapes, queues, batch, kv_tokens):
    requests = [
        Request(i, a, p, o, prefix_ids=tuple(group * 100 + b for b in range(p // BLOCK)))
        for i, (a, p, o, group) in enumerate(shapes)
    ]
    loop = ServingLoop(requests, queues, limits(kv_tokens, batch), RoundRobin())
    complete = loop.complete

    def checked(step, duration_ms, finished=()):
        complete(step, duration_ms, finished)
        idle = np.array([cache.idle_tokens for cache in loop.kv.caches])
        assert (loop.kv.used_G >= 0).all() and (loop.kv.used_G + idle <= kv_tokens).all()

    loop.complete = checked  # type: ignore[method-assign]
    plans = drive(loop)
    assert (loop.produced_R == loop.output_R).all() and (loop.kv.used_G == 0).all()
    computed = sum(plan.num_tokens for plan in plans)
    needed = int((loop.prompt_R + loop.output_R - 1 - loop.hit_tokens_R).sum())
    assert computed >= needed if loop.preemptions else computed == needed


def test_preempted_requests_find_their_own_blocks_again():
    requests = [Request(i, 0.0, 12, 20, prefix_ids=(10 * i, 10 * i + 1, 10 * i + 2)) for i in range(2)]
    loop, plans = served(requests, kv_tokens=44)
    assert loop.preemptions and loop.prefix_hit_rate == 0.0
    chunks = [(s, n) for p in plans for r, s, n in zip(p.request_N, p.start_N, p.count_N, strict=True) if r == 1]
    assert (loop.produced_R == 20).all() and [s for s, n in chunks if n > 1] == [0, 8], "two of three blocks were left"


@pytest.mark.parametrize("blocks", [-1, -512])
def test_negative_blocks_are_refused(blocks):
    from semmoe.errors import UserError

    with pytest.raises(UserError, match="prefix_block_tokens"):
        ServingLimits(prefix_block_tokens=blocks)
