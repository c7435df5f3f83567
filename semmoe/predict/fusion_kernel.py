"""Compiled look-up of the fused predictor: int8 token rows, and scores of a batch in one pass over its tokens."""

from __future__ import annotations

import numba
import numpy as np

from .base import FIXED_POINT
from .fusion_fit import log_lift_token

STEP = 1.0 / 16  # nats of one unit of the int8 token rows


@numba.njit(cache=True)
def quantised_rows(counts_UE, tokens_U, k, kappa, back_off_E, prior_E):  # type: ignore[no-untyped-def]
    """int8 [U + 1, E] of log(P / p0) in STEPs; the last row is that of an unseen type."""
    types, experts = counts_UE.shape
    rows = np.empty((types + 1, experts), dtype=np.int8)
    none_E = np.zeros(experts, dtype=np.int32)
    lift_E = np.empty(experts, dtype=np.float64)
    for u in range(types + 1):
        seen = tokens_U[u] if u < types else 0
        log_lift_token(counts_UE[u] if u < types else none_E, seen, k, kappa, back_off_E, prior_E, lift_E)
        for e in range(experts):
            rows[u, e] = np.int8(min(max(np.rint(lift_E[e] / STEP), -127.0), 127.0))
    return rows


@numba.njit(cache=True)
def fused_scores(row_T, history_TBk, token_UE, lift_B2EE, weight_F, bias_E, mask_EG, top_k):  # type: ignore[no-untyped-def]
    """(share_TG, fixed-point score_TG, largest share of a rank); q and its sums over ranks in one pass over tokens."""
    tokens, experts, ranks = len(row_T), token_UE.shape[1], mask_EG.shape[1]
    backs, k = min(lift_B2EE.shape[0], history_TBk.shape[1]), history_TBk.shape[2]
    share = np.zeros((tokens, ranks), dtype=np.float32)
    score = np.empty((tokens, ranks), dtype=np.int32)
    best = np.zeros(tokens, dtype=np.float32)
    copies_E = mask_EG.sum(axis=1)
    owner_E = np.zeros(experts, dtype=np.int64)
    for e in range(experts):
        for g in range(ranks):
            if mask_EG[e, g]:
                owner_E[e] = g
    unit = weight_F[0] * np.float32(STEP)
    z = np.empty(experts, dtype=np.float32)
    for t in range(tokens):
        row = token_UE[row_T[t]]
        for e in range(experts):
            z[e] = bias_E[e] + unit * np.float32(row[e])
        for b in range(backs):
            for i in range(k):
                before = history_TBk[t, b, i]
                if before < 0:
                    continue
                w = weight_F[1 + b * k + i]
                lift = lift_B2EE[b, min(i, 1), before]
                for e in range(experts):
                    z[e] += w * lift[e]
        top = z[0]
        for e in range(1, experts):
            top = max(top, z[e])
        total = np.float32(0.0)
        for e in range(experts):
            z[e] = np.exp(z[e] - top)
            total += z[e]
        for e in range(experts):
            if copies_E[e] == 1:
                share[t, owner_E[e]] += z[e]
            else:
                for g in range(ranks):
                    if mask_EG[e, g]:
                        share[t, g] += z[e]
        for g in range(ranks):
            share[t, g] /= total
            score[t, g] = np.int32(np.rint(share[t, g] * top_k * FIXED_POINT))
            best[t] = max(best[t], share[t, g])
    return share, score, best
