"""StepPlanner: homes and slots are those of the flow, and a history shows actual experts only."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.schedule.base import Plan, capacity_of
from semmoe.schedule.none import NoShuffle


def spec(flow):
    return DispatchSpec(flow=flow, dispatcher=None if flow == "tp_replicated" else "a2a_dedup", hidden=8, top_k=2)


def placement(slots=8):
    rows = np.stack([np.random.default_rng(layer).permutation(8) for layer in range(3)])
    extra = np.tile(np.arange(slots - 8), (3, 1))
    return Placement(np.concatenate([rows, extra], axis=1), 4, (1, 2, 3), 8)


def test_homes_of_each_flow(trace):
    rows = np.arange(10)
    assert StepPlanner(trace, placement(), spec("tp_replicated")).route(rows, None).homes_TL is None
    queue = np.arange(10) % 3
    dp = StepPlanner(trace, placement(), spec("dp")).route(rows, queue).homes_TL
    assert (dp == queue[:, None]).all()
    scattered = StepPlanner(trace, placement(), spec("tp_scattered")).route(rows, None).homes_TL
    assert scattered[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    shuffled = StepPlanner(trace, placement(), spec("tp_shuffled"), NoShuffle()).route(rows, None).homes_TL
    assert np.array_equal(shuffled, scattered)


def test_slots_hold_the_experts_of_the_routes(trace):
    place = placement()
    routed = StepPlanner(trace, place, spec("dp")).route(np.array([5, 200]), np.array([0, 1]))
    for t, row in enumerate((5, 200)):
        for layer in range(3):
            held = place.physical_to_logical_LP[layer, routed.slots_TLk[t, layer]]
            assert np.array_equal(held, trace.experts_TLk[row, layer])


class Watching:
    """A predictor that looks two layers back and keeps what it was shown."""

    lookback = 2

    def __init__(self):
        self.seen = {}

    def scores(self, token_ids_T, layer, history, placement):
        self.seen[layer] = history.copy()
        return np.zeros((len(token_ids_T), placement.ep_size), np.int32), np.zeros(len(token_ids_T), np.float32)


def test_history_holds_actual_experts_newest_first(trace):
    predictor = Watching()
    StepPlanner(trace, placement(), spec("tp_shuffled"), NoShuffle(), predictor).route(np.array([7, 9]), None)
    assert (predictor.seen[0] == -1).all()
    assert (
        np.array_equal(predictor.seen[1][:, 0], trace.experts_TLk[[7, 9], 0]) and (predictor.seen[1][:, 1] == -1).all()
    )
    assert np.array_equal(predictor.seen[2], trace.experts_TLk[[7, 9]][:, [1, 0]])


def test_what_is_missing_is_named(trace):
    for make, message in (
        (lambda: StepPlanner(trace, placement(), spec("tp_shuffled")), "token scheduler"),
        (lambda: StepPlanner(trace, placement(12), spec("dp")), "replica router"),
        (lambda: StepPlanner(trace, placement(), spec("dp"), home_cap=0.5), "home_cap"),
    ):
        with pytest.raises(UserError, match=message):
            make()


def test_plan_inverts_itself():
    owner = np.array([1, 0, 1, 0, 2])
    plan = Plan.from_owner(owner, 4)
    assert plan.perm_T.tolist() == [1, 3, 0, 2, 4] and plan.counts_G.tolist() == [2, 2, 1, 0]
    assert (plan.perm_T[plan.starts_G[plan.owner_T] + plan.slot_T] == np.arange(5)).all()
    empty = Plan.from_owner(np.zeros(0, int), 3)
    assert empty.counts_G.tolist() == [0, 0, 0] and len(empty.perm_T) == 0


def test_capacity_holds_all_tokens():
    assert [capacity_of(t, 4, 1.1) for t in (0, 1, 8, 512)] == [0, 1, 2, 140]
