"""ShufflePlan: where every token of an attention-TP batch goes, as tensors that all ranks hold alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.schedule.base import Plan


@dataclass(frozen=True, eq=False)
class ShufflePlan:
    """`semmoe.schedule.base.Plan` on a device: rank r holds tokens perm_T[starts_G[r] : starts_G[r] + counts_G[r]].

    identity: the tokens already stand in rank order (tp_scattered), so that no row has to be picked one by one.
    """

    perm_T: Tensor
    slot_T: Tensor
    owner_T: Tensor
    counts_G: list[int]
    starts_G: list[int]
    identity: bool

    @classmethod
    def from_plan(cls, plan: Plan, device: str | torch.device = "cpu") -> ShufflePlan:
        perm_T, slot_T, owner_T = (
            torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device)
            for a in (plan.perm_T, plan.slot_T, plan.owner_T)
        )
        identity = bool((plan.perm_T == np.arange(len(plan.perm_T))).all())
        counts, starts = ([int(x) for x in a] for a in (plan.counts_G, plan.starts_G))
        return cls(perm_T, slot_T, owner_T, counts, starts, identity)

    @classmethod
    def from_homes(cls, homes_T: NDArray[np.integer], ranks: int, device: str | torch.device = "cpu") -> ShufflePlan:
        """The stable plan of a given home per token (`RoutedStep.homes_TL[:, layer]`)."""
        return cls.from_plan(Plan.from_owner(np.asarray(homes_T), ranks), device)

    @property
    def tokens(self) -> int:
        return len(self.perm_T)

    @cached_property
    def counts_on_device_G(self) -> Tensor:
        return torch.tensor(self.counts_G, dtype=torch.int64, device=self.perm_T.device)

    @cached_property
    def starts_on_device_G(self) -> Tensor:
        return torch.tensor(self.starts_G, dtype=torch.int64, device=self.perm_T.device)

    @cached_property
    def place_T(self) -> Tensor:
        """Where each token stands in rank order: the inverse of perm_T."""
        place_T = torch.empty_like(self.perm_T)
        place_T[self.perm_T] = torch.arange(len(self.perm_T), device=self.perm_T.device)
        return place_T

    def mine_T(self, rank: int) -> Tensor:
        """The tokens that `rank` is home to, in its order."""
        return self.perm_T[self.starts_G[rank] : self.starts_G[rank] + self.counts_G[rank]]


@dataclass(frozen=True, eq=False)
class HomeScores:
    """Homes still to be assigned, by prices (`semmoe.schedule.priced`): score_TG int32 on the layer's device, at most
    `capacity` tokens on a rank. With kernels no score leaves the device."""

    score_TG: Tensor
    capacity: int
