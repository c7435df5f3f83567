"""Strided: expert e on rank e mod G, which spreads neighbouring ids over the ranks."""

from __future__ import annotations

import numpy as np

from .base import Placement, PlacementProblem


class Strided:
    """Copy i of the list 0..E-1, 0.. goes to rank i mod G (vLLM's `round_robin`); redundant slots repeat from 0.

    Worked example, 6 experts on 2 ranks: slots [0, 2, 4 | 1, 3, 5].
    """

    def place(self, problem: PlacementProblem) -> Placement:
        experts, ranks = problem.model.num_experts, problem.ep_size
        copies_P = np.arange(problem.slots, dtype=np.int32) % experts
        row_P = copies_P.reshape(problem.slots // ranks, ranks).T.ravel()
        table = np.tile(row_P, (problem.model.num_moe_layers, 1))
        return Placement(table, ranks, problem.layer_ids, experts)
