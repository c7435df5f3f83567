"""Round robin: request i on rank i mod G, in order of assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class RoundRobin:
    """Ranks in turn from `start`, whatever their load. Holds the turn: use one instance a run."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        rank = self._next % ranks.ranks
        self._next = rank + 1
        return rank
