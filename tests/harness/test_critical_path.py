"""Where the time of ranks that wait for each other goes, on one clock."""

from __future__ import annotations

import numpy as np
import pytest

from harness.critical_path import attribute
from harness.timing import EXCHANGES, PHASES


def marks(start: int, **ends: int) -> list[tuple[str, int]]:
    return [("", start), *((name.rstrip("_"), end) for name, end in ends.items())]


def of(found) -> dict[str, float]:
    return {name: float(ns.sum()) for name, ns in found.path_L.items() if ns.any()}


def test_a_rank_waits_until_the_last_one_enters_and_the_path_follows_that_one():
    ranks = [[marks(0, gate=3, dispatch=9)], [marks(0, gate=5, dispatch=9)]]
    found = attribute(ranks, ["a", "b"])
    assert of(found) == {"gate": 5, "dispatch": 4}
    assert (found.wait_L.tolist(), found.core_wait_L.tolist()) == ([1.0], [0.0])


def test_ranks_of_one_core_wait_for_it_and_not_for_each_other():
    ranks = [[marks(0, gate=3, dispatch=9)], [marks(3, gate=5, dispatch=9)]]
    found = attribute(ranks, ["a", "a"])
    assert of(found) == {"gate": 5, "dispatch": 4}
    assert (found.wait_L.tolist(), found.core_wait_L.tolist()) == ([0.0], [2.5])


def test_what_the_other_rank_of_a_core_computes_is_no_exchange():
    """Rank 0 leaves the exchange at 4 and computes until 8; only then rank 1 gets the core and leaves it too."""
    ranks = [
        [marks(0, gate=2, dispatch=4, experts=8, combine=13)],
        [marks(0, gate=2, dispatch=8, experts=12, combine=13)],
    ]
    found = attribute(ranks, ["a", "a"])
    assert of(found) == {"gate": 2, "dispatch": 2, "experts": 8, "combine": 1}
    assert found.core_wait_L.tolist() == [(1 + 1 + 4 + 4) / 2]


def test_layers_of_a_step_share_one_path_and_add_up_to_it():
    """Rank 1 is late into layer 1; rank 0 has begun it already."""
    slow = [marks(0, gate=2, dispatch=5, permute=6), marks(6, gate=12, dispatch=14, permute=15)]
    fast = [marks(0, gate=1, dispatch=5, permute=6), marks(6, gate=8, dispatch=14, permute=15)]
    found = attribute([fast, slow], [0, 1])
    assert found.path_L["gate"].tolist() == [2.0, 6.0] and found.path_L["dispatch"].tolist() == [3.0, 2.0]
    assert found.path_L["permute"].tolist() == [1.0, 1.0]
    assert found.wait_L.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_path_adds_up_to_the_window_and_every_rank_is_accounted_for(cores):
    rng = np.random.default_rng(cores)
    now_G = rng.integers(0, 50, 4)
    begin, ranks = now_G.min(), [[], [], [], []]
    for _ in range(3):
        for layers, now in zip(ranks, now_G, strict=True):
            layers.append([("", int(now))])
        for name in ("gate", "permute", "dispatch", "permute", "experts", "combine", "permute"):
            waited_G = np.full(4, now_G.max()) if name in EXCHANGES else now_G
            now_G = waited_G + rng.integers(0, 50, 4)
            for layers, now in zip(ranks, now_G, strict=True):
                layers[-1].append((name, int(now)))
    found = attribute(ranks, [g % cores for g in range(4)])
    late = sum(found.path_L[phase].sum() for phase in PHASES) - (now_G.max() - begin)
    assert -50 <= late <= 0, "all but the time before the first of the path begins"
    assert (found.wait_L >= 0).all() and (found.core_wait_L >= 0).all()
    assert cores < 4 or not found.core_wait_L.any()
    assert cores > 1 or found.core_wait_L.sum() > found.wait_L.sum()
