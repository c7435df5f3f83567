"""Random: a seeded uniform choice, the baseline that balances only on average."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class Random:
    """A uniformly random rank, whatever the loads and scores. Holds its generator: use one instance a run."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        return int(self._rng.integers(ranks.ranks))
