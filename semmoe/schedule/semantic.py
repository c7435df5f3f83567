"""Semantic token scheduling: every token to the rank that it asks for most, exactly, within the capacity of a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped
from .base import Plan


class Semantic:
    """Homes of the largest summed score with at most `capacity` tokens a rank; ties by (score, token, rank).

    Exact (see semmoe.assign). Tokens of one rank keep their order in the batch.
    """

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan:
        return Plan.from_owner(assign_capped(score_TG, capacity), score_TG.shape[1])
