"""Contiguous blocks: the placement that every engine uses when told nothing."""

from __future__ import annotations

import numpy as np

from .base import Placement, PlacementProblem


class Contiguous:
    """Slot p holds expert p; redundant slots repeat the experts from 0 (vLLM's and SGLang's initial map)."""

    def place(self, problem: PlacementProblem) -> Placement:
        experts = problem.model.num_experts
        row_P = np.arange(problem.slots, dtype=np.int32) % experts
        table = np.tile(row_P, (problem.model.num_moe_layers, 1))
        return Placement(table, problem.ep_size, problem.layer_ids, experts)
