"""Fusion: token id and the actual experts of the layers before, added in log-odds.

q(e | token u, experts S1 of layer l-1, S2 of layer l-2)
    = softmax_e( b[e] + w0 log(P[u, e] / p0[e]) + sum_b sum_{i < k} w[b, i] log(Q_b[S_b[i], e] / p0[e]) )

p0 share of all choices; P the smoothed row of the token type (unseen types: of types that one request alone used, the
best picture of a type that no request used yet); Q_b[a, e] share of choices that went to e after a, b layers before.
Weights and b per layer by cross-entropy, see fusion_fit.py. The k choices of a layer come ordered by gate weight, so
each place i has a weight of its own. The k ids a token are carried beside the all-gather of its hidden row
(DispatchSpec.carry_expert_ids).

The token rows are stored as int8 in steps of 1/16 nat: an error of at most 0.03 nats before weighting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..placement.base import Placement
from ..profile import Profile, count_by_row
from .base import FIXED_POINT, ExpertPredictor
from .fusion_fit import fit_weights, left_out_features, log_lift_pairs, log_lift_token, softmax
from .vocabulary import TypeRows

STEP = 1.0 / 16  # nats of one unit of the int8 token rows
START_WEIGHTS = (0.40, 0.35, 0.22)  # token, one layer back, two back: where a layer has too little data to say


@dataclass(frozen=True, eq=False)
class _Layer:
    """Tables of one layer. token_UE int8 log lift in STEPs (last row: unseen type); lift_BEE log(Q_b / p0)."""

    token_UE: NDArray[np.int8]
    lift_BEE: NDArray[np.float32]
    weight_F: NDArray[np.float32]
    bias_E: NDArray[np.float32]
    entropy: float


class Fusion(ExpertPredictor):
    """Log-odds of the token id and of the actual experts of the previous one or two layers, weights fitted per layer.

    lookback: layers looked back (0: token id alone, 1, 2); kappa: weight of the back-off in a token row, in tokens;
    pseudo: the same for a row of Q; fit_tokens: training tokens that the weights are fitted on; ridge: pull of the
    weights to usual values, in squared units a fit token; embedding: file of the model's embedding (see vocabulary.py)
    for the back-off of unseen tokens to their nearest neighbour.
    """

    def __init__(
        self,
        lookback: int = 2,
        kappa: float = 2.0,
        pseudo: float = 5.0,
        fit_tokens: int = 8192,
        ridge: float = 1.0,
        embedding: str | None = None,
    ) -> None:
        if lookback not in (0, 1, 2):
            raise UserError(f"predictor.lookback={lookback} must be 0, 1 or 2")
        for name, number in (("kappa", kappa), ("pseudo", pseudo), ("fit_tokens", fit_tokens), ("ridge", ridge)):
            if not number > 0:
                raise UserError(f"predictor.{name}={number} must be positive")
        self.lookback, self.kappa, self.pseudo = lookback, kappa, pseudo
        self.fit_tokens, self.ridge, self.embedding = fit_tokens, ridge, embedding

    def fit(self, profile: Profile) -> None:
        self.profile = profile
        self.top_k = profile.trace.top_k
        self.types = TypeRows.fit(profile, self.embedding)
        tokens = profile.trace.num_tokens
        rng = np.random.default_rng(0)
        self._sampled_T = np.zeros(tokens, dtype=np.bool_)
        self._sampled_T[rng.choice(tokens, size=min(self.fit_tokens, tokens), replace=False)] = True
        self._rare_T = self.types.used_by_one_request_U(profile)[profile.type_T]
        self.layers = [self._fit_layer(layer) for layer in range(profile.num_layers)]

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables that a look-up may touch."""
        parts = (a.nbytes for layer in self.layers for a in (layer.token_UE, layer.lift_BEE))
        return int(self.types.row_V.nbytes + sum(parts))

    def experts(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None
    ) -> NDArray[np.float32]:
        """q [T, E]."""
        table = self.layers[layer]
        everyone = np.eye(table.token_UE.shape[1], dtype=np.bool_)
        return self._sums(token_ids_T, layer, history, everyone)[0]

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        _, score_TG, best_T = self._sums(token_ids_T, layer, history, placement.rank_mask_LEG[layer])
        return score_TG, best_T

    def left_out_experts(self, rows_S: NDArray[np.integer], layer: int) -> NDArray[np.float32]:
        """q [S, E] of training tokens (rows of the profile's trace), each from tables without its own request."""
        sampled_T = np.zeros(self.profile.trace.num_tokens, dtype=np.bool_)
        sampled_T[rows_S] = True
        in_order, place_S = np.unique(rows_S, return_inverse=True)
        features_SFE = self._features(layer, sampled_T, len(in_order))
        table = self.layers[layer]
        width = features_SFE.shape[1]
        z_SE = np.einsum("f,sfe->se", table.weight_F[:width], features_SFE) + table.bias_E
        return softmax(z_SE).astype(np.float32)[place_S]

    def _sums(
        self,
        token_ids_T: NDArray[np.integer],
        layer: int,
        history: NDArray[np.integer] | None,
        mask_EG: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        table = self.layers[layer]
        if history is None:
            history = np.full((len(token_ids_T), 0, self.top_k), -1, dtype=np.int16)
        return fused_scores(
            self.types.rows(token_ids_T),
            np.ascontiguousarray(history),
            table.token_UE,
            table.lift_BEE,
            table.weight_F,
            table.bias_E,
            mask_EG,
            self.top_k,
        )

    def _earlier(self, layer: int) -> NDArray[np.int16]:
        """earlier_BTk: experts of the layers before, newest first (fewer than `lookback` in the first layers)."""
        experts_TLk = self.profile.trace.experts_TLk
        backs = range(1, min(self.lookback, layer) + 1)
        shape = (len(backs), experts_TLk.shape[0], experts_TLk.shape[2])
        return np.array([experts_TLk[:, layer - b] for b in backs], dtype=np.int16).reshape(shape)

    def _prior(self, layer: int) -> NDArray[np.float64]:
        load_E = self.profile.load_LE[layer] + 0.5  # an expert without a hit keeps finite log-odds
        return np.asarray(load_E / load_E.sum())

    def _back_off(self, layer: int, prior_E: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of choices of the tokens whose type only one request used, leaning on p0."""
        hits = self.profile.trace.experts_TLk[self._rare_T, layer].ravel()
        count_E = np.bincount(hits, minlength=len(prior_E)) + self.pseudo * self.top_k * prior_E
        return np.asarray(count_E / count_E.sum())

    def _pairs(self, layer: int, backs: int) -> NDArray[np.int64]:
        experts = self.profile.num_experts
        pairs = [self.profile.transitions_EE(layer, b) for b in range(1, backs + 1)]
        return np.array(pairs, dtype=np.int64).reshape(backs, experts, experts)

    def _features(self, layer: int, sampled_T: NDArray[np.bool_], samples: int) -> NDArray[np.float32]:
        trace, prior_E = self.profile.trace, self._prior(layer)
        earlier_BTk = self._earlier(layer)
        return left_out_features(
            trace.request_offset_R1[:-1],
            trace.request_offset_R1[1:],
            sampled_T,
            self.profile.type_T,
            np.ascontiguousarray(trace.experts_TLk[:, layer]),
            earlier_BTk,
            self.profile.token_counts_UE(layer),
            self.profile.token_count_U.copy(),
            self._pairs(layer, len(earlier_BTk)),
            self._back_off(layer, prior_E),
            prior_E,
            self.kappa,
            self.pseudo,
            samples,
        )

    def _fit_layer(self, layer: int) -> _Layer:
        trace, k = self.profile.trace, self.top_k
        prior_E = self._prior(layer)
        rows_S = np.flatnonzero(self._sampled_T)
        features_SFE = self._features(layer, self._sampled_T, len(rows_S))
        hits_SE = count_by_row(np.arange(len(rows_S)), trace.experts_TLk[rows_S, layer], len(rows_S), len(prior_E))
        backs = (features_SFE.shape[1] - 1) // k
        start_F = np.concatenate([[START_WEIGHTS[0]], np.repeat(START_WEIGHTS[1:], k)])
        used = 1 + backs * k
        weight_F, bias_E, entropy = fit_weights(features_SFE, hits_SE, prior_E, start_F[:used], self.ridge)
        return _Layer(
            self._token_rows(layer, prior_E),
            self._lifts(layer, backs, prior_E),
            weight_F.astype(np.float32),
            bias_E.astype(np.float32),
            entropy,
        )

    def _token_rows(self, layer: int, prior_E: NDArray[np.float64]) -> NDArray[np.int8]:
        counts_UE = self.profile.token_counts_UE(layer)
        tokens_U = self.profile.token_count_U
        return quantised_rows(counts_UE, tokens_U, self.top_k, self.kappa, self._back_off(layer, prior_E), prior_E)

    def _lifts(self, layer: int, backs: int, prior_E: NDArray[np.float64]) -> NDArray[np.float32]:
        experts = len(prior_E)
        lift_BEE = np.empty((backs, experts, experts), dtype=np.float64)
        for b, pairs_EE in enumerate(self._pairs(layer, backs)):
            log_lift_pairs(pairs_EE, self.top_k, self.pseudo, prior_E, lift_BEE[b])
        return lift_BEE.astype(np.float32)


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
def fused_scores(row_T, history_TBk, token_UE, lift_BEE, weight_F, bias_E, mask_EG, top_k):  # type: ignore[no-untyped-def]
    """(share_TG, fixed-point score_TG, largest share of a rank); q and its sums over ranks in one pass over tokens."""
    tokens, experts, ranks = len(row_T), token_UE.shape[1], mask_EG.shape[1]
    backs, k = min(lift_BEE.shape[0], history_TBk.shape[1]), history_TBk.shape[2]
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
                lift = lift_BEE[b, before]
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
