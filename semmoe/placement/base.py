"""Placement (slots to experts), the problem that a policy solves, and the policy protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..profile import Profile
from ..specs import ClusterSpec, ModelSpec


@dataclass(frozen=True, eq=False)
class Placement:
    """physical_to_logical_LP[l, p] = expert in slot p of layer l (-1: empty); rank r owns the r-th block of P/ep_size.

    Raises UserError when P is not divisible by ep_size, an expert has no slot, or an id is out of range.
    """

    physical_to_logical_LP: NDArray[np.int32]
    ep_size: int
    layer_ids: tuple[int, ...]
    num_experts: int
    notes: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        table = np.ascontiguousarray(self.physical_to_logical_LP, dtype=np.int32)
        object.__setattr__(self, "physical_to_logical_LP", table)
        object.__setattr__(self, "layer_ids", tuple(int(i) for i in self.layer_ids))
        if table.ndim != 2 or table.shape[0] != len(self.layer_ids):
            raise UserError(
                f"placement: map of shape {table.shape} for {len(self.layer_ids)} layers; [layers, slots] is needed"
            )
        check_divisible(self.num_experts, table.shape[1], self.ep_size)
        if table.size and (table.max() >= self.num_experts or table.min() < -1):
            raise UserError(
                f"placement: expert ids run {table.min()}..{table.max()}; 0..{self.num_experts - 1} (or -1) is right"
            )
        for layer, row in enumerate(table):
            absent = np.setdiff1d(np.arange(self.num_experts), row)
            if len(absent):
                raise UserError(f"placement: layer {self.layer_ids[layer]}: experts {absent[:5].tolist()} have no slot")

    @classmethod
    def from_ranks(
        cls, rank_LE: NDArray[np.integer], ep_size: int, layer_ids: tuple[int, ...], notes: dict[str, Any] | None = None
    ) -> Placement:
        """A placement without replicas from the rank of each expert; experts keep their order inside a rank."""
        return cls(
            np.argsort(rank_LE, axis=1, kind="stable").astype(np.int32),
            ep_size,
            layer_ids,
            rank_LE.shape[1],
            notes or {},
        )

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical_LP.shape[0]

    @property
    def num_slots(self) -> int:
        return self.physical_to_logical_LP.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.ep_size

    @property
    def has_replicas(self) -> bool:
        return self.num_slots > self.num_experts

    @cached_property
    def logical_to_physical_LEX(self) -> NDArray[np.int32]:
        """Slots of every expert, in slot order, padded with -1 to the largest replica count X."""
        table = self.physical_to_logical_LP
        count = max(int(np.bincount(row[row >= 0], minlength=self.num_experts).max()) for row in table)
        slots = np.full((self.num_layers, self.num_experts, count), -1, dtype=np.int32)
        for layer, row in enumerate(table):
            filled = np.zeros(self.num_experts, dtype=np.int64)
            for slot, expert in enumerate(row):
                if expert >= 0:
                    slots[layer, expert, filled[expert]] = slot
                    filled[expert] += 1
        return slots

    @cached_property
    def replicas_LE(self) -> NDArray[np.int32]:
        """Number of slots of every expert."""
        return np.asarray((self.logical_to_physical_LEX >= 0).sum(axis=2), dtype=np.int32)

    @cached_property
    def first_slot_LE(self) -> NDArray[np.int32]:
        """The first (without replicas: the only) slot of every expert."""
        return np.ascontiguousarray(self.logical_to_physical_LEX[:, :, 0])

    @cached_property
    def rank_LE(self) -> NDArray[np.int32]:
        """The rank of every expert's first (without replicas: only) slot."""
        return np.asarray(self.first_slot_LE // self.slots_per_rank, dtype=np.int32)

    @cached_property
    def rank_mask_LEG(self) -> NDArray[np.bool_]:
        """Whether rank g holds a copy of expert e."""
        mask = np.zeros((self.num_layers, self.num_experts, self.ep_size), dtype=bool)
        rank_P = np.arange(self.num_slots) // self.slots_per_rank
        for layer, row in enumerate(self.physical_to_logical_LP):
            mask[layer, row[row >= 0], rank_P[row >= 0]] = True
        return mask


def check_divisible(num_experts: int, slots: int, ep_size: int) -> None:
    """UserError unless `slots` >= `num_experts` slots can be split evenly over `ep_size` ranks, no expert twice on one."""
    if ep_size < 1:
        raise UserError(f"ep_size={ep_size} must be at least 1")
    if slots < num_experts or slots % ep_size:
        right = -(-num_experts // ep_size) * ep_size
        divisors = [d for d in range(1, num_experts + 1) if num_experts % d == 0]
        near = min(divisors, key=lambda d: (abs(d - ep_size), d))
        raise UserError(
            f"{num_experts} experts in {slots} slots cannot be split over ep_size={ep_size}; use a divisor of "
            f"{num_experts} (nearest: {near}) or set placement.slots={right}"
        )
    if slots > num_experts * ep_size:
        raise UserError(
            f"placement.slots={slots} are more than {num_experts} experts on each of {ep_size} ranks can fill "
            f"({num_experts * ep_size}): a second copy on the same rank serves nothing"
        )


@dataclass(frozen=True)
class PlacementProblem:
    """Everything that a policy may look at. `home` says what is shared: "request" = one home a request over all layers
    (attention-DP), "token" = one home a token and layer (attention-TP)."""

    profile: Profile
    model: ModelSpec
    cluster: ClusterSpec
    ep_size: int
    slots: int
    home: str = "token"
    predictor: Any = None
    seed: int = 0
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        check_divisible(self.model.num_experts, self.slots, self.ep_size)
        if self.home not in ("token", "request"):
            raise UserError(f"home='{self.home}' must be 'token' or 'request'")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.model.layer_ids

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


class PlacementPolicy(Protocol):
    """A class with this method, named by Hydra's `_target_`, is a placement policy."""

    def place(self, problem: PlacementProblem) -> Placement: ...


def place_checked(policy: PlacementPolicy, problem: PlacementProblem) -> Placement:
    """The policy's placement; UserError when it is not one for this problem."""
    placement = policy.place(problem)
    name = type(policy).__name__
    if not isinstance(placement, Placement):
        raise UserError(f"placement policy {name} returned {type(placement).__name__}; place() must return a Placement")
    got = (placement.num_slots, placement.ep_size, placement.layer_ids, placement.num_experts)
    asked = (problem.slots, problem.ep_size, problem.layer_ids, problem.model.num_experts)
    for what, ours, theirs in zip(("slots", "ranks", "layers", "experts"), got, asked, strict=True):
        if ours != theirs:
            hint = "; it may not know redundant slots: leave placement.slots alone" if what == "slots" else ""
            raise UserError(f"placement policy {name} placed {what} {ours}, asked for were {theirs}{hint}")
    return placement
