"""Re-homing on the actual gate result: what it saves, what it may not do, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import make_trace

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.schedule.base import capacity_of
from semmoe.schedule.rehome import Rehome
from semmoe.schedule.semantic import Semantic
from semmoe.traffic import Traffic, count_traffic

RANKS = 4


def spec_of(dispatcher: str) -> DispatchSpec:
    return DispatchSpec(flow="tp_shuffled", dispatcher=dispatcher, hidden=8, top_k=2, carry_expert_ids=True)


def traffic_of(scheduler: object, tokens: int = 100) -> Traffic:
    trace, spec = make_trace(), spec_of("a2a_dedup")
    table = np.tile(np.arange(8, dtype=np.int32), (trace.num_layers, 1))
    placement = Placement(table, RANKS, tuple(trace.layer_ids_L), 8)
    step = StepPlanner(trace, placement, spec, scheduler, home_cap=1.1).route(np.arange(tokens), None)  # type: ignore[arg-type]
    return count_traffic(step.slots_TLk, step.homes_TL, 8, RANKS, spec, returns_TL=step.returns_TL)


def test_worked_example_of_the_docstring() -> None:
    slots, homes = np.array([[[2, 3]]]), np.array([[0]])  # two slots a rank: both experts on rank 1
    spec = spec_of("a2a_dedup")
    back, forth = (count_traffic(slots, homes, 8, RANKS, spec, returns_TL=r) for r in (None, np.array([[1]])))
    rows = {c.op: c.remote_rows_LGG().sum() for c in back.collectives if c.rows_LGG is not None}
    assert rows == {"srs": 3, "dispatch": 1, "combine": 1, "sag": 3, "expert_ids": 3}
    again = {c.op: c.remote_rows_LGG().sum() for c in forth.collectives if c.rows_LGG is not None}
    assert again == rows | {"combine": 0}
    assert [c.op for c in forth.collectives] == ["srs", "expert_ids", "dispatch", "combine", "sag"]
    assert forth.collectives[4].rows_LGG[0, 1].sum() == RANKS  # type: ignore[index] # the SAG leaves from the new home


def test_combine_shrinks_and_everything_before_it_stays() -> None:
    plain, moved = traffic_of(Semantic()), traffic_of(Rehome())
    before, after = ({c.op: c for c in t.collectives} for t in (plain, moved))
    assert after["combine"].remote_rows_LGG().sum() < before["combine"].remote_rows_LGG().sum()
    for op in ("srs", "dispatch"):
        assert np.array_equal(before[op].rows_LGG, after[op].rows_LGG)
    assert np.array_equal(plain.assignment_pairs_LGG, moved.assignment_pairs_LGG)
    assert plain.metadata_bytes == moved.metadata_bytes
    saved_L = (before["combine"].remote_rows_LGG() - 0).sum((1, 2)) - after["combine"].remote_rows_LGG().sum((1, 2))
    assert (saved_L <= 100).all()  # at most a row a token


def test_new_homes_keep_the_capacity_and_hold_the_row() -> None:
    rng = np.random.default_rng(0)
    for tokens in (0, 1, 37, 200):
        capacity = capacity_of(tokens, RANKS, 1.0)
        homes = np.arange(tokens) % RANKS
        serves = rng.random((tokens, RANKS)) < 0.3
        serves[:, 2] |= rng.random(tokens) < 0.8  # everybody would like rank 2
        new = Rehome().returns(serves, homes, capacity)
        assert np.bincount(new, minlength=RANKS).max(initial=0) <= capacity
        rows = np.arange(tokens)
        assert (serves[rows, new] | (new == homes)).all()


def test_other_dispatchers_are_refused() -> None:
    trace = make_trace()
    table = np.tile(np.arange(8, dtype=np.int32), (trace.num_layers, 1))
    placement = Placement(table, RANKS, tuple(trace.layer_ids_L), 8)
    with pytest.raises(UserError, match="needs dispatcher=a2a_dedup"):
        StepPlanner(trace, placement, spec_of("a2a_assignment"), Rehome())
