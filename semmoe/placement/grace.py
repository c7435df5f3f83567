"""GRACE-MoE's placement: spectral groups of experts that tokens use together, then copies of the hottest ones.

1. Co-activation graph of a layer: edge (e, f) weighs the tokens that activated both. 2. Its leading eigenvectors place the
experts in a space where those used together are close; they are grouped there, first into nodes (any sizes that leave
no rank empty), then into ranks of E / G experts, size_slack more or fewer. Exchanges bring each grouping near the optimum
of its objective, the co-activation kept inside groups. 3. Free slots: the hottest experts of the most loaded rank get
copies on the least loaded ranks with room, floor(its load / mean load) copies, at least 1 and at most G - 1; repeated.

Source: arXiv 2509.25041. It takes size_slack at the knee of (size deviation, kept weight); .15 is what it found. Slots
are equal per rank here, so uneven groups need free slots (placement.slots above the experts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped
from ..errors import UserError
from .base import Placement, PlacementProblem
from .groups import add_hot, from_holds, nodes_of
from .partition import kept, polish


class Grace:
    """Spectral groups of co-activated experts, of nearly equal size, and copies of hot experts in the free slots.

    size_slack: how far a rank's experts may differ from E / G, as a share. kicks: shuffles of the exchanges.
    notes["kept_share"]: share of co-activated pairs on one rank before copies.
    """

    def __init__(self, size_slack: float = 0.15, kicks: int = 24) -> None:
        if not 0 <= size_slack < 1:
            raise UserError(f"placement.size_slack={size_slack} must lie in 0..1 (0.15: 15 % more or fewer experts)")
        if kicks < 0:
            raise UserError(f"placement.kicks={kicks} must be at least 0")
        self.size_slack, self.kicks = size_slack, kicks

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks, nodes = problem.profile, problem.ep_size, nodes_of(problem)
        experts, room = profile.num_experts, problem.slots // problem.ep_size
        holds_LEG = np.zeros((profile.num_layers, experts, ranks), dtype=bool)
        kept_sum = total = 0.0
        for layer, holds_EG in enumerate(holds_LEG):
            weight_EE = profile.coactivation_EE(layer).astype(np.float64)
            np.fill_diagonal(weight_EE, 0.0)
            rank_E = np.empty(experts, dtype=np.int64)
            inside = ranks // nodes
            node_E = self.group(weight_EE, nodes, inside, room * inside, problem.seed)
            for node in range(nodes):
                mine = np.flatnonzero(node_E == node)
                fewest, most = size_bounds(len(mine), inside, self.size_slack, room)
                found = self.group(weight_EE[np.ix_(mine, mine)], inside, fewest, most, problem.seed)
                rank_E[mine] = node * inside + found
            holds_EG[np.arange(experts), rank_E] = True
            copy_hot(holds_EG, profile.load_LE[layer], room)
            kept_sum += kept(weight_EE, rank_E)
            total += weight_EE.sum() / 2
        return from_holds(holds_LEG, problem, {"kept_share": kept_sum / total if total else 1.0})

    def group(
        self, weight_EE: NDArray[np.float64], groups: int, fewest: int, most: int, seed: int
    ) -> NDArray[np.int64]:
        """group_E of `fewest` to `most` experts each (both must be able to hold E): spectral start, then exchanges."""
        experts = len(weight_EE)
        if groups == 1:
            return np.zeros(experts, dtype=np.int64)
        group_E = spectral_groups(weight_EE, groups, fewest, most, seed)
        spare_G = most - np.bincount(group_E, minlength=groups)
        group_N = np.concatenate([group_E, np.repeat(np.arange(groups), spare_G)])  # empty places follow the experts
        polish(weight_EE, group_N, groups, fewest, self.kicks, seed)
        return group_N[:experts]


def size_bounds(experts: int, groups: int, slack: float, room: int) -> tuple[int, int]:
    """(fewest, most) experts a group: E / G within the slack, at most `room`, and such that all fit and none is empty.

    Worked example: 16 experts, 4 groups, slack .3, room 5: 3 to 5.
    """
    mean = experts / groups
    most = min(room, max(int(mean * (1 + slack) + 1e-9), -(-experts // groups)))
    fewest = max(int(np.ceil(mean * (1 - slack) - 1e-9)), experts - (groups - 1) * most)
    return min(fewest, experts // groups), most


def spectral_groups(
    weight_EE: NDArray[np.float64], groups: int, fewest: int, most: int, seed: int
) -> NDArray[np.int64]:
    """Bounded k-means on the rows of the leading eigenvectors of D^-1/2 W D^-1/2 (Ng, Jordan, Weiss), unit length."""
    experts = len(weight_EE)
    scale_E = 1.0 / np.sqrt(np.maximum(weight_EE.sum(axis=1), 1e-12))
    _, vectors = np.linalg.eigh(weight_EE * scale_E[:, None] * scale_E[None, :])
    place_ED = vectors[:, -groups:]
    place_ED = place_ED / np.maximum(np.linalg.norm(place_ED, axis=1, keepdims=True), 1e-12)
    centre_GD = place_ED[np.random.default_rng(seed).choice(experts, size=groups, replace=experts < groups)]
    group_E = np.full(experts, -1, dtype=np.int64)
    for _ in range(20):
        fresh_E = bounded(np.rint(place_ED @ centre_GD.T * (1 << 24)).astype(np.int64), fewest, most)
        if np.array_equal(fresh_E, group_E):
            break
        group_E = fresh_E
        for g in np.unique(group_E):
            centre_GD[g] = place_ED[group_E == g].mean(axis=0)
    return group_E


def bounded(score_EG: NDArray[np.int64], fewest: int, most: int) -> NDArray[np.int64]:
    """owner_E of the largest summed score with `fewest` to `most` experts a group.

    Each group is split into a part of `fewest` places, which a bonus fills first, and one of the places above it.
    """
    experts, groups = score_EG.shape
    bonus = 1 << 26  # above any difference of two scores
    if fewest * groups == experts or fewest == most:
        return assign_capped(score_EG, most)
    capacity = np.repeat([fewest, most - fewest], groups)
    return assign_capped(np.concatenate([score_EG + bonus, score_EG], axis=1), capacity) % groups


def copy_hot(holds_EG: NDArray[np.bool_], load_E: NDArray[np.integer], slots_a_rank: int) -> None:
    """GRACE's copies (holds_EG in place): hot experts of the heaviest rank to the least loaded ranks, until slots are full.

    An expert's load is shared by its copies. Where the heaviest rank has nothing left to copy, any hot expert will do.
    """
    ranks = holds_EG.shape[1]
    while (free_G := slots_a_rank - holds_EG.sum(axis=0)).sum() > 0:
        per_copy_E = load_E / holds_EG.sum(axis=1)
        load_G = per_copy_E @ holds_EG
        heavy = int(load_G.argmax())
        able_E = holds_EG[:, heavy] & (~holds_EG & (free_G > 0)).any(axis=1) & (per_copy_E > 0)
        if not able_E.any():
            add_hot(holds_EG, load_E, slots_a_rank)
            return
        expert = int(np.where(able_E, per_copy_E, -1.0).argmax())
        copies = min(max(1, int(load_G[heavy] / max(load_G.mean(), 1e-12))), ranks - 1)
        for rank in np.argsort(load_G, kind="stable"):
            if copies and free_G[rank] > 0 and not holds_EG[expert, rank]:
                holds_EG[expert, rank] = True
                copies -= 1
