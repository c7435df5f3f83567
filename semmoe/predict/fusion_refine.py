"""Second stage of the fused predictor: the transition tables themselves, moved to where they predict best.

log(Q / p0) counts each expert of the past on its own, but the k experts of a layer go together, so their sum counts
shared evidence more than once. Here a correction D is added to every table and fitted by cross-entropy with a ridge
towards no correction (multinomial logistic regression with the first stage as its start):

    z[s] = z0[s] + sum_f scale[f] D[column[s, f]],   minimise  mean_s -log q[s, hits] + ridge / S |D|^2

column[s, f] names one row of D: (layers back, first choice or not, expert). Worked example with B = 1, k = 2, E = 4: a
token whose layer before chose experts (3, 1) reads rows 3 (first choice, expert 3) and 4 + 1 = 5 (later, expert 1).
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

MAX_ITERATIONS = 30


def columns(earlier_BSk: NDArray[np.integer], num_experts: int) -> NDArray[np.int32]:
    """column_SF [S, B * k]: rows of D that every token reads."""
    backs, samples, k = earlier_BSk.shape
    later_k = (np.arange(k) > 0).astype(np.int32)
    base_Bk = (2 * np.arange(backs)[:, None] + later_k) * num_experts
    return np.asarray(base_Bk[:, None] + earlier_BSk).transpose(1, 0, 2).reshape(samples, backs * k).astype(np.int32)


def fit_corrections(
    start_SE: NDArray[np.floating],
    column_SF: NDArray[np.int32],
    scale_F: NDArray[np.floating],
    experts_Sk: NDArray[np.integer],
    rows: int,
    ridge: float,
) -> NDArray[np.float32]:
    """D [rows, E] of the module's formula, by L-BFGS; z0 = start_SE."""
    start_SE, scale_F = start_SE.astype(np.float32), scale_F.astype(np.float32)
    shape = (rows, start_SE.shape[1])

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        entropy, slope = entropy_and_slope(
            start_SE, column_SF, scale_F, experts_Sk, flat.reshape(shape).astype(np.float32)
        )
        pull = ridge / len(start_SE)
        return entropy + pull * float(flat @ flat), slope.ravel() + 2 * pull * flat

    found = minimize(loss, np.zeros(rows * shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": MAX_ITERATIONS})
    return np.asarray(found.x.reshape(shape), dtype=np.float32)


@numba.njit(cache=True)
def entropy_and_slope(start_SE, column_SF, scale_F, experts_Sk, correction_NE):  # type: ignore[no-untyped-def]
    """(mean cross-entropy in nats a choice, its derivative by every entry of D)."""
    samples, experts = start_SE.shape
    k = experts_Sk.shape[1]
    slope = np.zeros(correction_NE.shape, dtype=np.float64)
    gap = np.empty(experts, dtype=np.float32)
    entropy = 0.0
    for s in range(samples):
        for e in range(experts):
            gap[e] = start_SE[s, e]
        for f in range(column_SF.shape[1]):
            row = correction_NE[column_SF[s, f]]
            for e in range(experts):
                gap[e] += scale_F[f] * row[e]
        top = gap[0]
        for e in range(1, experts):
            top = max(top, gap[e])
        hit = np.float32(0.0)
        for j in range(k):
            hit += gap[experts_Sk[s, j]] - top
        total = np.float32(0.0)
        for e in range(experts):
            gap[e] = np.exp(gap[e] - top)
            total += gap[e]
        entropy += np.log(total) - hit / k
        for e in range(experts):
            gap[e] /= total
        for j in range(k):
            gap[experts_Sk[s, j]] -= np.float32(1.0 / k)
        for f in range(column_SF.shape[1]):
            into = slope[column_SF[s, f]]
            for e in range(experts):
                into[e] += scale_F[f] * gap[e]
    return entropy / samples, slope / samples
