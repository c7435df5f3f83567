"""Replica routers: every slot holds the asked expert, home comes first, the rest is even."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.placement.base import Placement
from semmoe.replica_router import LeastLoaded, Local

# rank 0: experts 0, 1, 0   rank 1: 2, 3, 0   rank 2: 4, 5, 1
REPLICATED = Placement(np.array([[0, 1, 0, 2, 3, 0, 4, 5, 1]], dtype=np.int32), 3, (0,), 6)


def batch(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(6)[:3] for _ in range(tokens)]).astype(np.int16)
    return experts, rng.integers(0, 3, tokens)


@pytest.mark.parametrize("router", [Local(), LeastLoaded()])
@pytest.mark.parametrize("homeless", [False, True])
def test_slots_hold_the_expert_and_home_replicas_come_first(router: object, homeless: bool) -> None:
    experts, homes = batch(200)
    homes = np.full_like(homes, -1) if homeless else homes
    slots = router.slots(experts, homes, REPLICATED, 0)  # type: ignore[attr-defined]
    assert np.array_equal(REPLICATED.physical_to_logical_LP[0][slots], experts)
    at_home = REPLICATED.rank_mask_LEG[0][experts, homes[:, None]] & (homes[:, None] >= 0)
    assert (slots // 3 == homes[:, None])[at_home].all()
    assert at_home.any() or homeless
    assert np.array_equal(slots, router.slots(experts, homes, REPLICATED, 0))  # type: ignore[attr-defined]


def rows(slots: np.ndarray) -> np.ndarray:
    return np.bincount(slots.ravel() // 3, minlength=3)


def test_least_loaded_evens_out_what_the_hash_leaves() -> None:
    experts, _ = batch(300)
    homes = np.full(300, -1)
    even, hashed = (
        rows(LeastLoaded().slots(experts, homes, REPLICATED, 0)),
        rows(Local().slots(experts, homes, REPLICATED, 0)),
    )
    assert even.max() < hashed.max()
    assert even.max() - even.min() <= 3 * 300 * 0.07


def test_least_loaded_by_hand() -> None:
    experts = np.array([[2], [3], [0], [0], [1]])  # experts 2 and 3 have no choice: two rows on rank 1
    homes = np.array([0, 0, 2, 2, 1])
    assert LeastLoaded().slots(experts, homes, REPLICATED, 0).ravel().tolist() == [3, 4, 0, 0, 8]


def test_hash_uses_every_replica() -> None:
    experts = np.zeros((100, 1), dtype=np.int16)
    slots = Local().slots(experts, np.full(100, 2), REPLICATED, 0)
    assert (np.bincount(slots.ravel(), minlength=9)[[0, 2, 5]] > 15).all()
