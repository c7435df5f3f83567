"""No shuffling: tokens stay in contiguous equal chunks, as after a plain reduce-scatter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .base import Plan


class NoShuffle:
    """Chunk r of the T tokens, in order, on rank r; the first T mod G chunks hold one more. Scores are ignored."""

    keeps_order = True

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan:
        tokens, ranks = score_TG.shape
        counts_G = tokens // ranks + (np.arange(ranks) < tokens % ranks)
        if counts_G.max(initial=0) > capacity:
            raise ValueError(f"{tokens} tokens on {ranks} ranks do not fit a capacity of {capacity} tokens a rank")
        return Plan.from_owner(np.repeat(np.arange(ranks), counts_G), ranks)
