"""A small layer and a predictor whose homes differ between layers, for counted against predicted Traffic."""

from __future__ import annotations

from typing import Any

import numpy as np

from semmoe.placement.base import Placement

RANKS, HIDDEN, SLOTS = 4, 16, 12


class Scores:
    """A predictor that prefers a rank per token and layer, so that homes differ between layers."""

    lookback = 0

    def scores(self, token_ids_T: Any, layer: int, history: Any, placement: Placement) -> tuple[Any, Any]:
        wanted_T = (token_ids_T * 7 + layer) % placement.ep_size
        return (wanted_T[:, None] == np.arange(placement.ep_size)).astype(np.int32) * 100, np.ones(len(wanted_T))
