"""The paper's token rule (Algorithm 3): sort tokens by their predicted rank and cut the list into equal chunks.

The paper leaves "align" open; this is the reading of its third-party re-implementation. When predictions are skewed,
all tokens sorted behind an overfull rank slide over to a neighbour that they did not ask for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Plan


class SortCut:
    """Stable sort by the rank of highest score (ties to the lower), then chunks of equal size, the first ones longer."""

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan:
        tokens, ranks = score_TG.shape
        order_T = np.argsort(score_TG.argmax(axis=1), kind="stable")
        counts_G = tokens // ranks + (np.arange(ranks) < tokens % ranks)
        owner_T = np.empty(tokens, dtype=np.int64)
        owner_T[order_T] = np.repeat(np.arange(ranks), counts_G)
        return Plan.from_owner(owner_T, ranks)
