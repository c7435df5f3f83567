"""Greedy capacity-bounded homes: confident tokens choose first, the others take the best rank that has room."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from .base import Plan


class ConfidentFirst:
    """Tokens in order of the margin between their two best ranks; each takes the best rank with room (ties: lower).

    What a single pass can do; `semantic` is the exact solution of the same problem.
    """

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan:
        return Plan.from_owner(greedy_owners(score_TG, capacity), score_TG.shape[1])


@numba.njit(cache=True)
def greedy_owners(score_TG, capacity):  # type: ignore[no-untyped-def]
    tokens, ranks = score_TG.shape
    margin = np.empty(tokens, dtype=np.int64)
    for t in range(tokens):
        best, second = np.int64(-(1 << 62)), np.int64(-(1 << 62))
        for g in range(ranks):
            if score_TG[t, g] > best:
                best, second = score_TG[t, g], best
            elif score_TG[t, g] > second:
                second = score_TG[t, g]
        margin[t] = best - second if ranks > 1 else 0
    owner = np.empty(tokens, dtype=np.int64)
    count = np.zeros(ranks, dtype=np.int64)
    for t in np.argsort(-margin, kind="mergesort"):
        chosen = -1
        for g in range(ranks):
            if count[g] < capacity and (chosen < 0 or score_TG[t, g] > score_TG[t, chosen]):
                chosen = g
        owner[t] = chosen
        count[chosen] += 1
    return owner
