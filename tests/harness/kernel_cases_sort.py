"""Bodies of the tests of counting sorts: they run where TRITON_INTERPRET=1 was set before the kernels were imported."""

from __future__ import annotations

import torch

from harness.reference import ranking


def owners(tokens: int, ranks: int, kind: str = "random") -> torch.Tensor:
    if kind == "one":
        return torch.full((tokens,), ranks - 1)
    return torch.randint(0, ranks, (tokens,), generator=torch.Generator().manual_seed(tokens))


def same(a: ranking.TokenRanking, b: ranking.TokenRanking) -> bool:
    names = ("perm_T", "slot_T", "owner_T", "counts_on_device_G", "starts_on_device_G")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def check_ranking(cases: list[tuple[int, int, str, int]]) -> None:
    from harness.kernels.rank_tokens import rank_tokens

    for tokens, ranks, kind, programs in cases:
        owner_T = owners(tokens, ranks, kind)
        got, expected = rank_tokens(owner_T, ranks, programs), ranking.rank_tokens_by_sort(owner_T, ranks)
        assert same(got, expected), (tokens, ranks, kind)
    assert rank_tokens(owner_T.to(torch.int32), ranks).perm_T.equal(expected.perm_T)


def check_alignment(cases: list[tuple[int, int, int, int]]) -> None:
    from harness.kernels.align import moe_align
    from harness.reference import align

    for assignments, slots, block_m, programs in cases:
        slot_A = torch.randint(-1, slots, (assignments,), generator=torch.Generator().manual_seed(assignments))
        slot_A[slot_A == slots // 2] = -1  # an expert that is absent
        got, (sorted_P, block_slot_B) = (
            moe_align(slot_A, slots, block_m, programs),
            align.moe_align(slot_A, slots, block_m),
        )
        blocks = int(got.blocks_1)
        assert blocks == len(block_slot_B) <= got.most_blocks
        assert slots // 2 not in got.block_slot_B[:blocks]
        assert torch.equal(got.block_slot_B[:blocks], block_slot_B)
        assert torch.equal(got.sorted_P[: blocks * block_m], sorted_P)
        assert torch.equal(got.counts_S.long(), torch.bincount(slot_A[slot_A >= 0], minlength=slots))
