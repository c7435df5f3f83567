"""Power of two choices: the less loaded of two random ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class PowerOfTwo:
    """The less loaded of two distinct random ranks: queued and cached tokens, then requests, then the lower rank.

    Close to the shortest queue without asking every rank. Holds its generator: use one instance a run.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        pair = self._rng.choice(ranks.ranks, size=min(2, ranks.ranks), replace=False)
        tokens_G = np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G
        requests_G = np.asarray(ranks.running_G) + ranks.waiting_G
        return int(min(pair, key=lambda g: (tokens_G[g], requests_G[g], g)))
