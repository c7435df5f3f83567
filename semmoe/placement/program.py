"""The paper's 0-1 program (section 3.3), posed as maximisation: what `exact` solves and `lagrangian` bounds.

    maximise  sum_l sum_u sum_e counts[l, u, e] * [home(u) = rank_l(e)]
    such that every rank holds E / G experts in every layer and items of at most `capacity` weight.

Items are requests with one home for all layers (attention-DP) or token types with a home per layer (attention-TP: one
program a layer). With the homes bounded, the paper's balance term is a constraint instead of a price.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from ..assign import assign_capped, assign_equal
from ..errors import UserError
from ..schedule.base import capacity_of
from .base import Placement, PlacementProblem


@dataclass(frozen=True, eq=False)
class Program:
    """counts_LUE [L, U, E] assignments of item u to expert e (E a multiple of G: phantom experts have none).

    weight_U: what an item adds to the load of its home; capacity: the most that a home may carry.
    """

    counts_LUE: NDArray[np.int64]
    weight_U: NDArray[np.int64]
    ranks: int
    capacity: int

    def __post_init__(self) -> None:
        if self.counts_LUE.shape[2] % self.ranks:
            raise UserError(f"{self.counts_LUE.shape[2]} experts cannot be split evenly over {self.ranks} ranks")
        if self.counts_LUE.min(initial=0) < 0 or self.weight_U.min(initial=1) < 1:
            raise UserError("a program needs counts of at least 0 and weights of at least 1")

    @property
    def experts(self) -> int:
        return self.counts_LUE.shape[2]

    @property
    def total(self) -> int:
        return int(self.counts_LUE.sum())

    @property
    def equal_weights(self) -> bool:
        return bool((self.weight_U == self.weight_U[0]).all())

    @property
    def most_items(self) -> int:
        """Items a rank can be home to, where all weigh the same."""
        return int(self.capacity // self.weight_U[0])

    def scores_UG(self, rank_LE: NDArray[np.integer]) -> NDArray[np.int64]:
        """Assignments of every item that each rank would serve, over all layers."""
        return scores_of(self.counts_LUE, rank_LE, self.ranks)

    def homes(self, rank_LE: NDArray[np.integer], time_limit_s: float = 10.0) -> tuple[int, float, NDArray[np.int64]]:
        """(value, upper bound, home_U): the best homes for these experts; value == bound where proved optimal."""
        return best_homes(self.scores_UG(rank_LE), self.weight_U, self.capacity, time_limit_s)

    def experts_for(self, home_U: NDArray[np.integer]) -> NDArray[np.int64]:
        """rank_LE: the best experts for these homes (exact)."""
        home_UG = (home_U[:, None] == np.arange(self.ranks)).astype(np.int64)
        return np.stack([assign_equal(counts_UE.T @ home_UG) for counts_UE in self.counts_LUE])

    def alternate(self, starts: int, rng: np.random.Generator) -> tuple[int, NDArray[np.int64]]:
        """(value, rank_LE): best of several random starts of the two exact assignments in turn; a lower bound."""
        layers, _, experts = self.counts_LUE.shape
        best, best_rank = -1, np.zeros((layers, experts), dtype=np.int64)
        for _ in range(starts):
            rank_LE = np.stack([rng.permutation(np.arange(experts) % self.ranks) for _ in range(layers)])
            before = -1
            while True:
                now, _, home_U = self.homes(rank_LE)
                if now > best:
                    best, best_rank = now, rank_LE
                if now <= before:
                    break
                before, rank_LE = now, self.experts_for(home_U)
        return best, best_rank


def scores_of(counts_LUE: NDArray[np.integer], rank_LE: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    rank_LEG = (rank_LE[:, :, None] == np.arange(ranks)).astype(np.float64)
    return np.rint(np.einsum("lue,leg->ug", counts_LUE.astype(np.float64), rank_LEG)).astype(np.int64)


def programs_of(problem: PlacementProblem, home_cap: float = 1.10) -> list[Program]:
    """The programs of a problem: one over all layers (home="request"), or one a layer (home="token")."""
    profile, ranks = problem.profile, problem.ep_size
    if problem.slots > -(-profile.num_experts // ranks) * ranks:
        raise UserError(f"{problem.slots} slots for {profile.num_experts} experts: the 0-1 program has no replicas")
    layers = range(profile.num_layers)
    if problem.home == "request":
        counts = np.stack([profile.request_counts_RE(layer) for layer in layers])
        items = profile.trace.num_requests
        return [Program(_wide(counts, ranks), np.ones(items, np.int64), ranks, capacity_of(items, ranks, home_cap))]
    weight_U = profile.token_count_U.astype(np.int64)
    capacity = max(capacity_of(profile.trace.num_tokens, ranks, home_cap), int(weight_U.max()))
    return [Program(_wide(profile.token_counts_UE(layer)[None], ranks), weight_U, ranks, capacity) for layer in layers]


def ranks_of(placement: Placement) -> NDArray[np.int64]:
    """rank_LE of a placement without replicas."""
    if placement.logical_to_physical_LEX.shape[2] > 1:
        raise UserError("a placement with replicas has no single rank per expert")
    return placement.first_slot_LE.astype(np.int64) // placement.slots_per_rank


def best_homes(
    score_UG: NDArray[np.int64], weight_U: NDArray[np.int64], capacity: int, time_limit_s: float = 10.0
) -> tuple[int, float, NDArray[np.int64]]:
    """(value, upper bound, home_U) of the largest summed score within the capacity of every rank.

    Equal weights: exact flow. Unequal: HiGHS on the assignment program; warns and gives its bound at the time limit.
    """
    items, ranks = score_UG.shape
    if (weight_U == weight_U[0]).all():
        home_U = assign_capped(score_UG, int(capacity // weight_U[0]))
        value = int(score_UG[np.arange(items), home_U].sum())
        return value, float(value), home_U
    rows = np.kron(np.eye(items), np.ones(ranks))
    loads = np.kron(weight_U, np.eye(ranks))
    answer = milp(
        -score_UG.ravel().astype(float),
        constraints=[LinearConstraint(rows, 1, 1), LinearConstraint(loads, -np.inf, capacity)],
        integrality=np.ones(items * ranks),
        bounds=Bounds(0, 1),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    if answer.x is None:
        raise UserError(f"no homes for {items} items within capacity {capacity} a rank were found ({answer.message})")
    home_U = answer.x.reshape(items, ranks).argmax(axis=1)
    value = int(score_UG[np.arange(items), home_U].sum())
    bound = float(np.floor(-answer.mip_dual_bound + 1e-6))
    if answer.status != 0 and bound > value:
        warnings.warn(f"homes of {items} items: time limit, gap {bound / max(value, 1) - 1:.2%}", stacklevel=2)
    return value, max(bound, float(value)), home_U


def _wide(counts_LUE: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    short = -counts_LUE.shape[2] % ranks
    return np.pad(counts_LUE, ((0, 0), (0, 0), (0, short))).astype(np.int64)
