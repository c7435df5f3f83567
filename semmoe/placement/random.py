"""Random: an independent shuffle of the experts in every layer, a control for every other policy."""

from __future__ import annotations

import numpy as np

from .base import Placement, PlacementProblem


class Random:
    """Uniform over placements, from the problem's seed; redundant slots hold distinct random experts while they can."""

    def place(self, problem: PlacementProblem) -> Placement:
        experts, rng = problem.model.num_experts, problem.rng()
        rows = []
        for _ in range(problem.model.num_moe_layers):
            rounds = -(-problem.slots // experts)
            copies = np.concatenate([rng.permutation(experts) for _ in range(rounds)])[: problem.slots]
            rows.append(rng.permutation(copies))
        return Placement(np.array(rows, dtype=np.int32), problem.ep_size, problem.layer_ids, experts)
