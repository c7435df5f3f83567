"""Migration between placements: what moves is what was missing, from where it was, and renaming ranks keeps most in place."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.migration import aligned, moved_experts_LGG
from semmoe.placement.base import Placement
from semmoe.traffic.wiring import Wiring


def placement(*layers: list[int], ranks: int = 4, experts: int = 8) -> Placement:
    return Placement(np.array(layers, dtype=np.int32), ranks, tuple(range(len(layers))), experts)


def random_placement(seed: int, slots: int = 8) -> Placement:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation([*range(8), *rng.permutation(8)[: slots - 8]]) for _ in range(3)]
    return placement(*[row.tolist() for row in rows])


OLD = placement([0, 1, 2, 3, 4, 5, 6, 7])


def test_a_renamed_placement_moves_nothing():
    renamed, wiring = placement([6, 7, 4, 5, 2, 3, 0, 1]), Wiring.plain(4)
    assert moved_experts_LGG(OLD, renamed, wiring).sum() == 8
    assert not moved_experts_LGG(OLD, aligned(renamed, OLD, wiring, per_layer=False), wiring).any()


def test_a_swap_moves_two_experts_from_where_they_were():
    swapped = placement([0, 2, 1, 3, 4, 5, 6, 7])
    moved = moved_experts_LGG(OLD, swapped, Wiring.plain(4))
    assert moved.sum() == moved[0, 0, 1] + moved[0, 1, 0] == 2


def test_a_copy_comes_from_the_own_node_if_it_can_and_senders_take_turns():
    old = placement([0, 1, 2, 3, 0, 4, 5, 6, 7, 0, 1, 2], ranks=4, experts=8)  # expert 0 on ranks 0, 1 and 3
    new = placement([0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 1, 2], ranks=4, experts=8)  # and on rank 2 too
    moved = moved_experts_LGG(old, new, Wiring.plain(4, 2))
    assert moved[0, 3, 2] == 1 and moved[0, :2, 2].sum() == 0


@pytest.mark.parametrize("slots", [8, 12])
@pytest.mark.parametrize("wiring", [Wiring.plain(4), Wiring.plain(4, 2)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_every_missing_copy_is_fetched_once_and_renaming_never_costs(slots, wiring, per_layer):
    for seed in range(5):
        old, new = random_placement(seed, slots), random_placement(seed + 50, slots)
        kept = aligned(new, old, wiring, per_layer)
        for candidate in (new, kept):
            moved = moved_experts_LGG(old, candidate, wiring)
            missing = candidate.rank_mask_LEG & ~old.rank_mask_LEG
            assert (moved.sum(axis=1) == missing.sum(axis=1)).all() and not np.diagonal(moved, axis1=1, axis2=2).any()
        assert moved_experts_LGG(old, kept, wiring).sum() <= moved_experts_LGG(old, new, wiring).sum()
        blocks = [{tuple(sorted(b)) for b in p.physical_to_logical_LP[0].reshape(4, -1).tolist()} for p in (new, kept)]
        assert blocks[0] == blocks[1], "the same experts stay together"
