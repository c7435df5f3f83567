"""Tables and weights of the fused predictor: counted on training routes, weighted without in-sample optimism.

A weight fitted on the tokens that its own tables were counted from trusts those tables too much. So every request's
features come from tables without that request, or its block of requests: the counts of the block are taken out of the
shared tables, the features of its tokens are written, and the counts go back in.

Feature order of F = 1 + lookback * k: token row, then the k choices of layer - 1, the k of layer - 2, ...
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

MAX_NEWTON_STEPS = 12


@numba.njit(cache=True)
def log_lift_token(count_E, tokens, k, kappa, back_off_E, prior_E, out_E):  # type: ignore[no-untyped-def]
    """out = log(P / p0) of one token type: P = (count / k + kappa * back-off) / (tokens + kappa)."""
    for e in range(len(prior_E)):
        share = (count_E[e] / k + kappa * back_off_E[e]) / (tokens + kappa)
        out_E[e] = np.log(share / prior_E[e])


@numba.njit(cache=True)
def log_lift_pairs(pairs_EE, k, pseudo, prior_E, out_EE):  # type: ignore[no-untyped-def]
    """out[a, e] = log(Q[a, e] / p0[e]): Q the share of choices that went to e among tokens that had chosen a."""
    experts = len(prior_E)
    for a in range(experts):
        total = 0
        for e in range(experts):
            total += pairs_EE[a, e]
        for e in range(experts):
            share = (pairs_EE[a, e] / k + pseudo * prior_E[e]) / (total / k + pseudo)
            out_EE[a, e] = np.log(share / prior_E[e])


@numba.njit(cache=True)
def left_out_features(  # type: ignore[no-untyped-def]
    begin_R,
    end_R,
    sampled_T,
    type_T,
    experts_Tk,
    earlier_BTk,
    counts_UE,
    tokens_U,
    pairs_BEE,
    back_off_E,
    prior_E,
    kappa,
    pseudo,
    samples,
):
    """features_SFE of the sampled tokens, in order of their rows; tables are restored before it returns.

    begin_R, end_R: rows of each request or block of requests; earlier_BTk: experts of the layers before, newest first.
    """
    experts, k, back = len(prior_E), experts_Tk.shape[1], len(earlier_BTk)
    features = np.empty((samples, 1 + back * k, experts), dtype=np.float32)
    lift_BEE = np.empty((back, experts, experts), dtype=np.float64)
    row_E = np.empty(experts, dtype=np.float64)
    s = 0
    for r in range(len(begin_R)):
        wanted = 0
        for t in range(begin_R[r], end_R[r]):
            wanted += sampled_T[t]
        if wanted == 0:
            continue
        for sign in (-1, 1):
            for t in range(begin_R[r], end_R[r]):
                tokens_U[type_T[t]] += sign
                for j in range(k):
                    counts_UE[type_T[t], experts_Tk[t, j]] += sign
                    for b in range(back):
                        for i in range(k):
                            pairs_BEE[b, earlier_BTk[b, t, i], experts_Tk[t, j]] += sign
            if sign > 0:
                break
            for b in range(back):
                log_lift_pairs(pairs_BEE[b], k, pseudo, prior_E, lift_BEE[b])
            for t in range(begin_R[r], end_R[r]):
                if not sampled_T[t]:
                    continue
                u = type_T[t]
                log_lift_token(counts_UE[u], tokens_U[u], k, kappa, back_off_E, prior_E, row_E)
                for e in range(experts):
                    features[s, 0, e] = row_E[e]
                for b in range(back):
                    for i in range(k):
                        for e in range(experts):
                            features[s, 1 + b * k + i, e] = lift_BEE[b, earlier_BTk[b, t, i], e]
                s += 1
    return features


def softmax(z_SE: NDArray[np.floating]) -> NDArray[np.float64]:
    z_SE = z_SE - z_SE.max(axis=1, keepdims=True)
    e_SE = np.exp(z_SE)
    return np.asarray(e_SE / e_SE.sum(axis=1, keepdims=True))


def fit_weights(
    features_SFE: NDArray[np.float32],
    hits_SE: NDArray[np.floating],
    prior_E: NDArray[np.floating],
    start_F: NDArray[np.floating],
    ridge: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """(weight_F, bias_E, cross-entropy in nats a choice) minimising mean_s -sum_e hits[s, e] / k log q[s, e] +
    ridge / S * (|weight - start|^2 + |bias - log p0|^2), q = softmax(bias + weight . features), by Newton steps.

    The loss is convex, and the ridge makes it strictly so where a feature or an expert never occurs.
    """
    samples, width = features_SFE.shape[:2]
    target_SE = hits_SE / hits_SE.sum(axis=1, keepdims=True)
    start = np.concatenate([start_F, np.log(prior_E)])
    theta, pull = start.copy(), ridge / samples

    def loss_and_share(theta: NDArray[np.float64]) -> tuple[float, float, NDArray[np.float64]]:
        z_SE = np.einsum("f,sfe->se", theta[:width].astype(np.float32), features_SFE) + theta[width:]
        q_SE = softmax(z_SE)
        entropy = float(-(target_SE * np.log(np.maximum(q_SE, 1e-30))).sum() / samples)
        return entropy + pull * float(((theta - start) ** 2).sum()), entropy, q_SE

    loss, entropy, q_SE = loss_and_share(theta)
    for _ in range(MAX_NEWTON_STEPS):
        gap_SE = q_SE - target_SE
        gradient = np.concatenate([np.einsum("sfe,se->f", features_SFE, gap_SE, optimize=True), gap_SE.sum(axis=0)])
        gradient = gradient / samples + 2 * pull * (theta - start)
        hessian = _hessian(features_SFE, q_SE) / samples + 2 * pull * np.eye(len(theta))
        step, size = np.linalg.solve(hessian, gradient), 1.0
        while size > 1e-3:
            trial = loss_and_share(theta - size * step)
            if trial[0] <= loss:
                break
            size /= 2
        else:
            break
        gained, theta = loss - trial[0], theta - size * step
        loss, entropy, q_SE = trial
        if gained < 1e-7:
            break
    return theta[:width], theta[width:], entropy


def _hessian(features_SFE: NDArray[np.float32], q_SE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over samples of the covariance under q of (features, one-hot expert): [F + E, F + E]."""
    width = features_SFE.shape[1]
    q32_SE = q_SE.astype(np.float32)
    weighted_SFE = features_SFE * q32_SE[:, None]
    mean_SF = weighted_SFE.sum(axis=2)
    ff = weighted_SFE.transpose(1, 0, 2).reshape(width, -1) @ features_SFE.transpose(1, 0, 2).reshape(width, -1).T
    ff -= mean_SF.T @ mean_SF
    fe = weighted_SFE.sum(axis=0) - mean_SF.T @ q32_SE
    ee = np.diag(q32_SE.sum(axis=0)) - q32_SE.T @ q32_SE
    return np.block([[ff, fe], [fe.T, ee]]).astype(np.float64)
