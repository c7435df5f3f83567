"""Experts that the same tokens ask for on one rank: a start for the alternation of token homes and experts.

Maximise sum over pairs of experts on one rank of A[e, f] = sum_s q[s, e] q[s, f] - (sum_s q[s, e]) (sum_s q[s, f]) / S,
the covariance of the experts' shares over sampled tokens, by trades between ranks of equal size. The alternation alone
is stuck early: homes that follow the experts confirm whatever blocks they find. Covariance does not look at homes.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


def covariance_EE(share_SE: NDArray[np.floating], experts: int) -> NDArray[np.float64]:
    """A [experts, experts]; phantom experts beyond those of share_SE have none."""
    centred = share_SE - share_SE.mean(axis=0)
    wide = np.zeros((experts, experts))
    wide[: share_SE.shape[1], : share_SE.shape[1]] = centred.T @ centred
    return wide


@numba.njit(cache=True)
def cluster(similarity_EE, rank_E, ranks):  # type: ignore[no-untyped-def]
    """Trade experts between ranks (rank_E in place), each with its best partner, until no trade raises the sum."""
    experts = len(rank_E)
    pull_EG = np.zeros((experts, ranks), dtype=np.float64)  # similarity of e to all others on g
    for e in range(experts):
        for f in range(experts):
            if e != f:
                pull_EG[e, rank_E[f]] += similarity_EE[e, f]
    least = 1e-9 * (1.0 + np.abs(similarity_EE).sum() / experts)
    improved = True
    while improved:
        improved = False
        for a in range(experts):
            here = rank_E[a]
            partner, best = -1, least
            for b in range(experts):
                there = rank_E[b]
                if there == here:
                    continue
                gain = pull_EG[a, there] - pull_EG[a, here] + pull_EG[b, here] - pull_EG[b, there]
                gain -= 2.0 * similarity_EE[a, b]
                if gain > best:
                    partner, best = b, gain
            if partner >= 0:
                there = rank_E[partner]
                for e in range(experts):
                    shift = similarity_EE[e, partner] * (e != partner) - similarity_EE[e, a] * (e != a)
                    pull_EG[e, here] += shift
                    pull_EG[e, there] -= shift
                rank_E[a], rank_E[partner] = there, here
                improved = True
