"""Token ranking and block alignment: the kernels in the interpreter against torch's sorts, the CPU twins too."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import kernel_cases_sort
import torch
from kernel_cases_sort import owners, same
from rank_processes import rank_processes

from harness.reference import align, ranking
from semmoe.schedule.base import Plan


def on_first(function, *arguments):
    import kernel_cases

    return rank_processes().run(kernel_cases.on_rank_zero, function, arguments)[0]


def test_ranking_kernel_equals_the_stable_sort_of_torch() -> None:
    """One launch and two, programs of one tile and of several (64 bins: tiles of 128), everything on one rank."""
    sizes = [(t, w, "random", 64) for t in (0, 1, 7, 64) for w in (1, 2, 8)]
    more = [(1000, 3, "one", 64), (4096, 8, "random", 64), (1500, 64, "random", 64), (700, 64, "random", 2)]
    on_first(kernel_cases_sort.check_ranking, sizes + more)


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_one_pass_twin_is_the_plan_of_the_core(tokens: int, ranks: int) -> None:
    owner_T = owners(tokens, ranks)
    got, plan = ranking.rank_tokens(owner_T, ranks), Plan.from_owner(owner_T.numpy(), ranks)
    assert same(got, ranking.rank_tokens_by_sort(owner_T, ranks))
    assert got.perm_T.tolist() == plan.perm_T.tolist() and got.slot_T.tolist() == plan.slot_T.tolist()
    assert got.to_plan().counts_G == plan.counts_G.tolist()


def test_an_unstable_order_would_be_seen() -> None:
    """Negative control: tokens of one rank in reverse order make another ranking."""
    owner_T = owners(64, 4)
    backward = ranking.rank_tokens_by_sort(owner_T.flip(0), 4)
    unstable = ranking.TokenRanking(
        63 - backward.perm_T,
        backward.slot_T.flip(0),
        owner_T,
        *[backward.counts_on_device_G, backward.starts_on_device_G],
    )
    assert torch.equal(owner_T[unstable.perm_T], owner_T.sort().values)
    assert not same(unstable, ranking.rank_tokens(owner_T, 4))


def test_alignment_kernel_makes_blocks_of_present_experts_only() -> None:
    cases = [(0, 4, 4, 64), (1, 4, 4, 64), (6, 3, 2, 64), (100, 5, 16, 64), (1500, 60, 16, 64), (700, 64, 16, 2)]
    on_first(kernel_cases_sort.check_alignment, cases)


def test_worked_example_of_the_alignment() -> None:
    sorted_P, block_slot_B = align.moe_align(torch.tensor([2, 0, -1, 2, 2]), 3, 2)
    assert sorted_P.tolist() == [1, 5, 0, 3, 4, 5] and block_slot_B.tolist() == [0, 2, 2]


def test_no_list_of_slots_needs_more_blocks_than_are_reserved() -> None:
    """Worst case: one assignment alone in every slot but one; a bound one lower would not do."""
    for assignments, slots, block_m in ((9, 4, 4), (3, 8, 16), (64, 8, 8), (0, 4, 4)):
        slot_A = torch.cat([torch.arange(min(assignments, slots)), torch.zeros(max(assignments - slots, 0))]).long()
        needed = len(align.moe_align(slot_A, slots, block_m)[1])
        most = present_and_full(assignments, slots, block_m)
        assert needed == most and all(
            len(align.moe_align(torch.randint(0, slots, (assignments,)), slots, block_m)[1]) <= most for _ in range(20)
        )


def present_and_full(assignments: int, slots: int, block_m: int) -> int:
    from harness.kernels.align import most_blocks

    return most_blocks(assignments, slots, block_m)
