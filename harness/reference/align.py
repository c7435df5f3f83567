"""Block alignment in plain torch: the twin of `harness.kernels.align`."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_align(slot_A: Tensor, slots: int, block_m: int) -> tuple[Tensor, Tensor]:
    """(sorted_P, block_slot_B), exactly as long as there are blocks: see `harness.kernels.align`."""
    assignments = len(slot_A)
    order_A = slot_A.argsort(stable=True)
    order_A = order_A[slot_A[order_A] >= 0]
    counts_S = torch.bincount(slot_A[order_A], minlength=slots)
    places, block_slots = [], []
    for slot, part in enumerate(order_A.split(counts_S.tolist())):
        blocks = -(-len(part) // block_m)
        padding = torch.full((blocks * block_m - len(part),), assignments, device=slot_A.device)
        places += [part, padding]
        block_slots += [slot] * blocks
    return torch.cat(places).int(), torch.tensor(block_slots, dtype=torch.int32, device=slot_A.device)
