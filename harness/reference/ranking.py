"""Token ranking on a CPU: the twin of `harness.kernels.rank_tokens`, and torch's own pipeline as its baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import torch
from torch import Tensor

from ..transport.plan import ShufflePlan


@dataclass(frozen=True, eq=False)
class TokenRanking:
    """A shuffle plan that stays on its device, counts included: all int64; see `semmoe.schedule.base.Plan`.

    It goes wherever kernels take a plan; `to_plan` reads the counts to the host, as transports want them.
    """

    perm_T: Tensor
    slot_T: Tensor
    owner_T: Tensor
    counts_on_device_G: Tensor
    starts_on_device_G: Tensor

    @property
    def tokens(self) -> int:
        return len(self.perm_T)

    def to_plan(self) -> ShufflePlan:
        counts, starts = self.counts_on_device_G.tolist(), self.starts_on_device_G.tolist()
        identity = bool((self.perm_T == torch.arange(self.tokens, device=self.perm_T.device)).all())
        return ShufflePlan(self.perm_T, self.slot_T, self.owner_T.long(), counts, starts, identity)


def rank_tokens(owner_T: Tensor, ranks: int) -> TokenRanking:
    """Count, then place, each token touched twice: owner_T int64 on the CPU, contiguous, in 0..ranks-1."""
    perm_T, slot_T = torch.empty_like(owner_T), torch.empty_like(owner_T)
    counts_G, starts_G = (torch.empty(ranks, dtype=torch.int64) for _ in range(2))
    _place(*(a.numpy() for a in (owner_T, perm_T, slot_T, counts_G, starts_G)))
    return TokenRanking(perm_T, slot_T, owner_T, counts_G, starts_G)


def rank_tokens_by_sort(owner_T: Tensor, ranks: int) -> TokenRanking:
    """The same with torch's operations, on any device: sort, count, sum, invert."""
    perm_T = owner_T.argsort(stable=True)
    if owner_T.is_cuda:  # bincount sizes its result on the host, which no graph can capture
        counts_G = torch.zeros(ranks, dtype=torch.int64, device=owner_T.device)
        counts_G.scatter_add_(0, owner_T, torch.ones_like(owner_T))
    else:
        counts_G = torch.bincount(owner_T, minlength=ranks)
    starts_G = counts_G.cumsum(0) - counts_G
    slot_T = torch.empty_like(perm_T)
    slot_T[perm_T] = torch.arange(len(owner_T), device=owner_T.device) - starts_G[owner_T[perm_T]]
    return TokenRanking(perm_T, slot_T, owner_T, counts_G, starts_G)


@numba.njit(cache=True)
def _place(owner_T, perm_T, slot_T, counts_G, starts_G):  # type: ignore[no-untyped-def]
    counts_G[:] = 0
    for t in range(len(owner_T)):
        slot_T[t] = counts_G[owner_T[t]]
        counts_G[owner_T[t]] += 1
    start = 0
    for g in range(len(counts_G)):
        starts_G[g] = start
        start += counts_G[g]
    for t in range(len(owner_T)):
        perm_T[starts_G[owner_T[t]] + slot_T[t]] = t
