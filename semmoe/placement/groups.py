"""From groups of experts to slots, shared by the policies that decide a rank per expert first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Placement, PlacementProblem


def most_a_rank(experts: int, ranks: int) -> int:
    """Experts a rank holds when they are spread evenly; the last ranks may hold fewer."""
    return -(-experts // ranks)


def with_phantoms(matrix_EE: NDArray[Any], experts: int) -> NDArray[Any]:
    """[..., experts, experts]: rows and columns of zeros for experts that only fill up the ranks."""
    short = experts - matrix_EE.shape[-1]
    return np.pad(matrix_EE, [(0, 0)] * (matrix_EE.ndim - 2) + [(0, short), (0, short)])


def nodes_of(problem: PlacementProblem) -> int:
    """Nodes that the ranks fill, 1 where they do not fill whole nodes."""
    per_node = problem.cluster.ranks_per_node
    return problem.ep_size // per_node if problem.ep_size % per_node == 0 else 1


def placed(rank_LE: NDArray[np.integer], problem: PlacementProblem, notes: dict[str, Any] | None = None) -> Placement:
    """The placement of these ranks (phantom experts beyond E are dropped), free slots filled with hot experts.

    A free slot takes the expert of the largest load per copy that some rank with room lacks, on the least loaded such
    rank: what a policy without replication rules of its own would do for balance.
    """
    experts, ranks = problem.model.num_experts, problem.ep_size
    holds_LEG = np.asarray(rank_LE[:, :experts, None] == np.arange(ranks))
    for holds_EG, load_E in zip(holds_LEG, problem.profile.load_LE, strict=True):
        add_hot(holds_EG, load_E, problem.slots // ranks)
    return from_holds(holds_LEG, problem, notes)


def add_hot(holds_EG: NDArray[np.bool_], load_E: NDArray[np.number], slots_a_rank: int) -> None:
    """Fill the free slots of one layer (holds_EG in place), hottest expert per copy first."""
    free_G = slots_a_rank - holds_EG.sum(axis=0)
    while free_G.sum() > 0:
        per_copy_E = load_E / holds_EG.sum(axis=1)
        rank_load_G = per_copy_E @ holds_EG
        room_EG = ~holds_EG & (free_G > 0)
        able_E = room_EG.any(axis=1)
        if not able_E.any():  # every rank with room already holds every expert
            break
        expert = int(np.where(able_E, per_copy_E, -1.0).argmax())
        rank = int(np.where(room_EG[expert], rank_load_G, np.inf).argmin())
        holds_EG[expert, rank] = True
        free_G[rank] -= 1


def from_holds(
    holds_LEG: NDArray[np.bool_], problem: PlacementProblem, notes: dict[str, Any] | None = None
) -> Placement:
    """Slots from who holds what: a rank's experts in ascending order, empty slots (-1) last."""
    ranks, size = problem.ep_size, problem.slots // problem.ep_size
    table_LGS = np.full((len(holds_LEG), ranks, size), -1, dtype=np.int32)
    for layer, holds_EG in enumerate(holds_LEG):
        for rank in range(ranks):
            held = np.flatnonzero(holds_EG[:, rank])
            table_LGS[layer, rank, : len(held)] = held
    table = table_LGS.reshape(len(table_LGS), -1)
    return Placement(table, ranks, problem.layer_ids, problem.model.num_experts, notes or {})
