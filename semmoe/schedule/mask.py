"""The paper's request rule (Algorithm 2): the best rank that no other request of the round has taken.

A rank is masked when it gets a request; when all are masked, the round ends and the mask is cleared. Every G requests
in a row thus cover all G ranks, and the last of each round has no choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class Mask:
    """The rank of the highest score among those not yet taken in this round; ties to the lower rank.

    Holds the mask: use one instance a run. Loads are not looked at, as in the paper.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def values(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> NDArray[np.float64]:
        """The scores, -inf at masked ranks."""
        value_G = np.zeros(ranks.ranks) if score_G is None else np.asarray(score_G, dtype=np.float64).copy()
        value_G[list(self._taken)] = -np.inf
        return value_G

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        rank = int(self.values(request, score_G, head_counts, ranks).argmax())
        self._taken.add(rank)
        if len(self._taken) == ranks.ranks:
            self._taken.clear()
        return rank
