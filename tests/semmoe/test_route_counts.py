"""Fast counting of routes equals the plain one, row by row: octets and many ranks, replicas, idle steps, several steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semmoe.dispatch import DISPATCHERS, DispatchSpec
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.replica_router import Local
from semmoe.trace import RoutingTrace
from semmoe.traffic import count_trace_rows, count_traffic, differences
from semmoe.traffic.route_counts import count_pairs, pair_sums, rank_of_slots


def routes(tokens: int, layers: int, ids: int, k: int, seed: int):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, ids)), axis=2)[:, :, :k].astype(np.int16)


def plain_counts(slots_TLk, homes_TL, num_slots: int, ep_size: int):
    """The definition, in numpy."""
    _, layers, _ = slots_TLk.shape
    rank_TLk = slots_TLk // (num_slots // ep_size)
    serves_TLG = (rank_TLk[..., None] == np.arange(ep_size)).sum(axis=2)
    home_TLG = (homes_TL[..., None] == np.arange(ep_size)).astype(np.int64)
    pairs = np.einsum("tls,tld->lsd", home_TLG, serves_TLG)
    distinct = np.einsum("tls,tld->lsd", home_TLG, (serves_TLG > 0).astype(np.int64))
    used_LP = np.array([np.bincount(slots_TLk[:, layer].ravel(), minlength=num_slots) > 0 for layer in range(layers)])
    active = used_LP.reshape(layers, ep_size, -1).sum(axis=2)
    return home_TLG.sum(axis=0), pairs, distinct, pairs.sum(axis=1), active


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.integers(0, 10**6))
@example(0, 2, 2, 8, 0)
def test_counting_equals_the_definition(tokens, layers, per_rank, ranks, seed):
    slots = routes(tokens, layers, per_rank * ranks, min(3, per_rank * ranks), seed)
    homes = np.random.default_rng(seed).integers(0, ranks, (tokens, layers))
    rank_LP = rank_of_slots(layers, per_rank * ranks, ranks)
    fast = count_pairs(slots, np.arange(tokens), rank_LP, homes, ranks)
    for got, wanted in zip(fast, plain_counts(slots, homes, per_rank * ranks, ranks), strict=True):
        assert np.array_equal(got, wanted)


def test_more_tokens_than_sixteen_bits_hold_on_one_pair():
    slots = np.tile(np.array([[[0, 1]]], dtype=np.int16), (70_000, 1, 1))
    counts = count_pairs(slots, np.arange(70_000), rank_of_slots(1, 4, 2), np.ones((70_000, 1)), 2)
    assert counts.assignment_pairs_LGG.tolist() == [[[0, 0], [140_000, 0]]]
    assert counts.rank_pairs_LGG.tolist() == [[[0, 0], [70_000, 0]]]
    assert counts.homes_LG.tolist() == [[0, 70_000]] and counts.active_experts_LG.tolist() == [[2, 0]]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from(DISPATCHERS),
    st.integers(0, 10**6),
)
def test_steps_counted_straight_from_the_trace_are_the_traffic_of_their_planned_routes(
    requests, steps, ranks, dispatcher, seed
):
    """Any placement of one slot an expert: each of the steps has the same Traffic as when it is planned and counted."""
    rng = np.random.default_rng(seed)
    trace = make_trace(20, 2, 16, 3, seed)
    experts_LP = np.stack([rng.permutation(16) for _ in range(2)])
    spec = DispatchSpec(flow="dp", dispatcher=dispatcher, hidden=256, top_k=3)
    placement = Placement(experts_LP, ranks, (0, 1), 16)
    rows_NS, rank_N = rng.integers(0, 20, (requests, steps)), rng.integers(0, ranks, requests)
    homes_T, step_T = np.repeat(rank_N, steps), np.tile(np.arange(steps), requests)
    together = count_trace_rows(
        trace.experts_TLk, rows_NS.ravel(), homes_T, placement, spec, step_T=step_T, steps=steps
    )
    planner = StepPlanner(trace, placement, spec)
    for s in range(steps):
        routed = planner.route(rows_NS[:, s], rank_N)
        alone = count_traffic(routed.slots_TLk, routed.homes_TL, 16, ranks, spec)
        part = together.cut(slice(2 * s, 2 * s + 2), requests)
        assert (
            part.tokens == requests
            and [d for d in differences(part, alone) if d.startswith(("homes", "assign", "rank", "expert", "active"))]
            == []
        )
        for mine, theirs in zip(together.collectives, alone.collectives, strict=True):
            assert np.array_equal(mine.rows_LGG[2 * s : 2 * s + 2], theirs.rows_LGG)


def test_replicas_count_as_slots_of_their_own():
    trace = make_trace(50, 2, 8, 2, 0)
    placement = Placement(np.tile(np.arange(12) % 8, (2, 1)), 4, (0, 1), 8)
    spec = DispatchSpec(flow="dp", dispatcher="a2a_dedup", hidden=256, top_k=2)
    homes = np.arange(50) % 4
    routed = StepPlanner(trace, placement, spec, replica_router=Local()).route(np.arange(50), homes)
    traffic = count_traffic(routed.slots_TLk, homes, 12, 4, spec)
    wanted = plain_counts(routed.slots_TLk, routed.homes_TL, 12, 4)
    for name, want in zip(("homes", "assignment_pairs", "rank_pairs"), wanted, strict=False):
        assert np.array_equal(getattr(traffic, f"{name}_L{'G' if name == 'homes' else 'GG'}"), want)
    assert np.array_equal(traffic.active_experts_LG, wanted[4])


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_sums_of_pairs_leave_the_diagonal_out(dtype):
    rows_LGG = np.random.default_rng(0).integers(0, 9, (3, 5, 5)).astype(dtype)
    sent, received, local, largest, remote = pair_sums(rows_LGG)
    off = rows_LGG * (1 - np.eye(5, dtype=dtype))
    assert np.array_equal(remote, off.sum(axis=(1, 2)))
    assert np.array_equal(sent, off.sum(axis=2)) and np.array_equal(received, off.sum(axis=1))
    assert np.array_equal(local, np.diagonal(rows_LGG, axis1=1, axis2=2)) and np.array_equal(largest, off.max((1, 2)))


def make_trace(tokens: int, layers: int, experts: int, k: int, seed: int) -> RoutingTrace:
    return RoutingTrace(
        model="random",
        num_experts=experts,
        vocab_size=10,
        experts_TLk=routes(tokens, layers, experts, k, seed),
        token_id_T=np.zeros(tokens, dtype=np.int64),
        request_offset_R1=np.array([0, tokens]),
        prompt_len_R=np.array([tokens]),
        domain_R=np.array(["random"]),
        layer_ids_L=np.arange(layers),
    )
