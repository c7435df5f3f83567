"""Index arithmetic of a dispatch: which rows go where, and which expert each assignment that arrived belongs to.

An assignment travels as two int32: its slot, and its gate weight as fp32 bits. The first assignment of every (token,
serving rank) pair carries ~slot (negative), so that the receiver knows where a token ends, with no further bytes.
Worked example, rank 0 of 2 with two slots each, one token with slots [3, 0, 2]: rank 0 serves slot 0; rank 1 gets
metadata [~3, 2] and either one row (dedup) or the row twice.

Letters: A assignments, n tokens at home here, G ranks, k choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """Assignments of this rank's tokens, sorted by serving rank, then token, then choice; split into local and remote.

    local_*: assignments that stay. remote_*: those that travel, in order of serving rank; remote_first marks the first
    of each (token, rank) pair. send_assignments_G, send_pairs_G: how many go to each rank (own rank: 0).
    """

    local_token_A: Tensor
    local_slot_A: Tensor
    local_weight_A: Tensor
    local_pairs: int
    remote_token_A: Tensor
    remote_first_A: Tensor
    remote_meta_A2: Tensor
    send_assignments_G: list[int]
    send_pairs_G: list[int]


def pack(slots_nk: Tensor, weights_nk: Tensor, slots_per_rank: int, rank: int, ranks: int) -> Packing:
    """Sort the assignments of n tokens by the rank that serves them."""
    k = slots_nk.shape[1]
    slot_A = slots_nk.reshape(-1)
    dest_A = torch.div(slot_A, slots_per_rank, rounding_mode="floor")
    order_A = dest_A.argsort(stable=True)
    dest_A, slot_A = dest_A[order_A], slot_A[order_A]
    token_A = torch.div(order_A, k, rounding_mode="floor")
    weight_A = weights_nk.reshape(-1)[order_A].float()
    first_A = torch.ones_like(token_A, dtype=torch.bool)
    first_A[1:] = (token_A[1:] != token_A[:-1]) | (dest_A[1:] != dest_A[:-1])
    assignments_G = torch.bincount(dest_A, minlength=ranks).tolist()
    pairs_G = torch.bincount(dest_A[first_A], minlength=ranks).tolist()
    start = sum(assignments_G[:rank])
    end = start + assignments_G[rank]
    remote_first_A = _without(first_A, start, end)
    remote_slot_A = _without(slot_A, start, end)
    coded_A = torch.where(remote_first_A, ~remote_slot_A, remote_slot_A).to(torch.int32)
    meta_A2 = torch.stack([coded_A, _without(weight_A, start, end).view(torch.int32)], dim=1)
    local_pairs = pairs_G[rank]
    assignments_G[rank] = pairs_G[rank] = 0
    return Packing(
        token_A[start:end],
        slot_A[start:end] - rank * slots_per_rank,
        weight_A[start:end],
        local_pairs,
        _without(token_A, start, end),
        remote_first_A,
        meta_A2,
        assignments_G,
        pairs_G,
    )


def unpack_meta(meta_A2: Tensor, first_slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """(local slot, weight, first) of assignments that arrived at the rank whose slots begin at `first_slot`."""
    coded_A = meta_A2[:, 0].long()
    first_A = coded_A < 0
    slot_A = torch.where(first_A, ~coded_A, coded_A) - first_slot
    return slot_A, meta_A2[:, 1].contiguous().view(torch.float32), first_A


def counts_by_sender(flags_A: Tensor, counts_G: list[int]) -> list[int]:
    """How many flags are set among the counts_G[0] assignments of rank 0, the next of rank 1, ..."""
    return [int(part.sum()) for part in flags_A.split(counts_G)]


def _without(values_A: Tensor, start: int, end: int) -> Tensor:
    return torch.cat([values_A[:start], values_A[end:]])
