"""Experts that the same tokens ask for on one rank: a start for the alternation of token homes and experts.

Maximise sum over pairs of experts on one rank of A[e, f] = sum_s q[s, e] q[s, f] - (sum_s q[s, e]) (sum_s q[s, f]) / S,
the covariance of the experts' shares over sampled tokens, by trades between ranks of equal size (partition.improve).
The alternation alone is stuck early: homes that follow the experts confirm whatever blocks they find. Covariance does
not look at homes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def covariance_EE(share_SE: NDArray[np.floating], experts: int) -> NDArray[np.float64]:
    """A [experts, experts]; phantom experts beyond those of share_SE have none."""
    centred = share_SE - share_SE.mean(axis=0)
    wide = np.zeros((experts, experts))
    wide[: share_SE.shape[1], : share_SE.shape[1]] = centred.T @ centred
    return wide
