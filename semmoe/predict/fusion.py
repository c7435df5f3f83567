"""Fusion: token id and the actual experts of the layers before, added in log-odds.

q(e | token u, experts S1 of layer l-1, S2 of layer l-2)
    = softmax_e( b[e] + w0 log(P[u, e] / p0[e]) + sum_b sum_{i < k} w[b, i] A[b, i > 0][S_b[i], e] )

p0 share of all choices; P the smoothed row of the token type (unseen types: of types that one request alone used, the
best picture of a type that no request used yet); A[b, .][a, e] = log(Q_b[a, e] / p0[e]) + a correction, Q_b the share of
choices that went to e after a, b layers before. The k choices of a layer come ordered by gate weight, so each place i
has a weight of its own and the first choice a table of its own. First b and w are fitted per layer by cross-entropy
(fusion_fit.py), then the corrections (fusion_refine.py). The k ids a token are carried beside the all-gather of its
hidden row (DispatchSpec.carry_expert_ids).

The token rows are stored as int8 in steps of 1/16 nat: an error of at most 0.03 nats before weighting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..placement.base import Placement
from ..profile import Profile, count_by_row
from .base import ExpertPredictor
from .fusion_fit import fit_weights, left_out_features, log_lift_pairs, softmax
from .fusion_kernel import fused_scores, quantised_rows
from .fusion_refine import columns, fit_corrections
from .vocabulary import TypeRows

GROUPS = 3  # of training requests: one is predicted by the others
BLOCKS = 64  # requests leave the tables one by one, or in this many blocks of neighbours where there are more
CLOSE = 0.01  # nats a choice
START_WEIGHTS = (0.40, 0.35, 0.22)  # token, one layer back, two back: where a layer has too little data to say


@dataclass(frozen=True, eq=False)
class _Layer:
    """Tables of one layer. token_UE int8 log lift in STEPs (last row: unseen type); lift_B2EE the tables A;
    left_out_SE: see Fusion.left_out."""

    token_UE: NDArray[np.int8]
    lift_B2EE: NDArray[np.float32]
    weight_F: NDArray[np.float32]
    bias_E: NDArray[np.float32]
    left_out_SE: NDArray[np.float16]
    entropy: float


class Fusion(ExpertPredictor):
    """Log-odds of the token id and of the actual experts of the previous one or two layers, weights fitted per layer.

    lookback: layers looked back (0: token id alone, 1, 2); kappa: weight of the back-off in a token row, in tokens;
    pseudo: the same for a row of Q; fit_tokens: training tokens that the weights are fitted on; ridge: pull of the
    weights to usual values, in squared units a fit token; refine: the same for the corrections of the transition tables
    (0: none; larger or none where groups of training requests say so of the others); embedding: file of the model's embedding
    (see vocabulary.py)
    for the back-off of unseen tokens to their nearest neighbour.
    """

    layers: dict[int, _Layer]

    def __init__(
        self,
        lookback: int = 2,
        kappa: float = 2.0,
        pseudo: float = 5.0,
        fit_tokens: int = 8192,
        ridge: float = 1.0,
        refine: float = 4.0,
        embedding: str | None = None,
    ) -> None:
        if lookback not in (0, 1, 2):
            raise UserError(f"predictor.lookback={lookback} must be 0, 1 or 2")
        for name, number in (("kappa", kappa), ("pseudo", pseudo), ("fit_tokens", fit_tokens), ("ridge", ridge)):
            if not number > 0:
                raise UserError(f"predictor.{name}={number} must be positive")
        self.lookback, self.kappa, self.pseudo = lookback, kappa, pseudo
        if not refine >= 0:
            raise UserError(f"predictor.refine={refine} must be at least 0")
        self.fit_tokens, self.ridge, self.refine, self.embedding = fit_tokens, ridge, refine, embedding

    def fit(self, profile: Profile) -> None:
        self._prepare(profile)
        self.refine_used = self._choose_refine(max(1, profile.num_layers // 2))
        self.layers = {layer: self._fit_layer(layer) for layer in range(profile.num_layers)}

    def _prepare(self, profile: Profile) -> None:
        """All that precedes the fit of a layer."""
        self.profile, self.top_k, self.refine_used = profile, profile.trace.top_k, self.refine
        self.types = TypeRows.fit(profile, self.embedding)
        tokens = profile.trace.num_tokens
        size = min(self.fit_tokens, tokens)
        self.fit_rows_S = np.sort(np.random.default_rng(0).choice(tokens, size=size, replace=False))
        self._sampled_T = np.zeros(tokens, dtype=np.bool_)
        self._sampled_T[self.fit_rows_S] = True
        self._rare_T = self.types.used_by_one_request_U(profile)[profile.type_T]
        self.layers = {}

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables that a look-up may touch."""
        parts = (a.nbytes for layer in self.layers.values() for a in (layer.token_UE, layer.lift_B2EE))
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

    def left_out(self, layer: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(rows_S, q_SE): training tokens (rows of the profile's trace) as unseen requests would be predicted.

        Their own block of requests is left out of every table; weights and bias, a few numbers fitted on thousands of
        tokens, are those of all. The corrections, fitted on these very tokens, are left out too. What a placement that
        will serve unseen requests should be optimised on.
        """
        return self.fit_rows_S, self.layers[layer].left_out_SE.astype(np.float32)

    def _history(self, rows_S: NDArray[np.integer], layer: int) -> NDArray[np.int16]:
        experts_TLk = self.profile.trace.experts_TLk
        history = np.full((len(rows_S), self.lookback, self.top_k), -1, dtype=np.int16)
        for back in range(1, min(self.lookback, layer) + 1):
            history[:, back - 1] = experts_TLk[rows_S, layer - back]
        return history

    def _choose_refine(self, layer: int) -> float:
        """The smallest ridge among 1, 4, 16 times `refine`, or none (0), that predicts a group of requests from the
        others within CLOSE of the best: with few routes the corrections learn noise, but all routes can afford a
        little less ridge than the groups could."""
        trace = self.profile.trace
        if not (self.refine > 0 and self.lookback and trace.num_layers > 1 and trace.num_requests > 1):
            return self.refine
        group_R = np.random.default_rng(0).permutation(np.arange(trace.num_requests) % GROUPS)
        other = Fusion(self.lookback, self.kappa, self.pseudo, self.fit_tokens, self.ridge, self.refine, self.embedding)
        other._prepare(Profile.fit(trace.select(np.flatnonzero(group_R != 0))))
        rows_S = np.flatnonzero(group_R[trace.request_T] == 0)
        chosen_Sk = trace.experts_TLk[rows_S, layer].astype(np.int64)
        found: dict[float, float] = {}
        for factor in (1.0, 4.0, 16.0, 0.0):
            other.refine_used = factor * self.refine
            other.layers = {layer: other._fit_layer(layer)}
            q_SE = other.experts(trace.token_id_T[rows_S], layer, self._history(rows_S, layer))
            found[other.refine_used] = float(-np.log(np.take_along_axis(q_SE, chosen_Sk, axis=1)).mean())
        return next(ridge for ridge, entropy in found.items() if entropy <= min(found.values()) + CLOSE)

    def _first_stage(
        self, features_SFE: NDArray[np.float32], weight_F: NDArray[np.floating], bias_E: NDArray[np.floating]
    ) -> NDArray[np.float32]:
        z_SE = np.einsum("f,sfe->se", weight_F.astype(np.float32), features_SFE) + bias_E.astype(np.float32)
        return np.ascontiguousarray(z_SE, dtype=np.float32)

    def _columns(
        self, layer: int, rows_S: NDArray[np.int64], weight_F: NDArray[np.floating]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        earlier_BSk = self._earlier(layer)[:, rows_S]
        scale_F = weight_F[1:] * np.repeat(_gain(weight_F, len(earlier_BSk)), self.top_k)
        return columns(earlier_BSk, self.profile.num_experts), scale_F.astype(np.float32)

    def _corrections(
        self,
        layer: int,
        z_SE: NDArray[np.float32],
        column_SF: NDArray[np.int32],
        scale_F: NDArray[np.float32],
        rows_S: NDArray[np.int64],
        ridge: float,
    ) -> NDArray[np.float32]:
        experts = self.profile.num_experts
        chosen_Sk = np.ascontiguousarray(self.profile.trace.experts_TLk[rows_S, layer])
        tables = 2 * (column_SF.shape[1] // self.top_k) * experts
        return fit_corrections(z_SE, column_SF, scale_F, chosen_Sk, tables, ridge)

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
            table.lift_B2EE,
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

    def _features(self, layer: int) -> NDArray[np.float32]:
        trace, prior_E = self.profile.trace, self._prior(layer)
        earlier_BTk = self._earlier(layer)
        step = -(-trace.num_requests // BLOCKS)
        bound_B1 = np.append(trace.request_offset_R1[:-1:step], trace.num_tokens)
        return left_out_features(
            bound_B1[:-1],
            bound_B1[1:],
            self._sampled_T,
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
            len(self.fit_rows_S),
        )

    def _weights(
        self, layer: int, features_SFE: NDArray[np.float32], rows_S: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        prior_E = self._prior(layer)
        hits_SE = count_by_row(
            np.arange(len(rows_S)), self.profile.trace.experts_TLk[rows_S, layer], len(rows_S), len(prior_E)
        )
        start_F = np.concatenate([[START_WEIGHTS[0]], np.repeat(START_WEIGHTS[1:], self.top_k)])
        return fit_weights(features_SFE, hits_SE, prior_E, start_F[: features_SFE.shape[1]], self.ridge)

    def _fit_layer(self, layer: int) -> _Layer:
        prior_E = self._prior(layer)
        rows_S = self.fit_rows_S
        features_SFE = self._features(layer)
        backs = (features_SFE.shape[1] - 1) // self.top_k
        weight_F, bias_E, entropy = self._weights(layer, features_SFE, rows_S)
        lift_B2EE = np.repeat(self._lifts(layer, backs, prior_E)[:, None], 2, axis=1)
        z_SE = self._first_stage(features_SFE, weight_F, bias_E)
        if self.refine_used > 0 and backs:
            column_SF, scale_F = self._columns(layer, rows_S, weight_F)
            correction = self._corrections(layer, z_SE, column_SF, scale_F, rows_S, self.refine_used).reshape(
                lift_B2EE.shape
            )
            lift_B2EE += correction * _gain(weight_F, backs).astype(np.float32)[:, None, None, None]
        return _Layer(
            self._token_rows(layer, prior_E),
            lift_B2EE,
            weight_F.astype(np.float32),
            bias_E.astype(np.float32),
            softmax(z_SE).astype(np.float16),
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


def _gain(weight_F: NDArray[np.floating], backs: int) -> NDArray[np.float64]:
    """[B] what makes the mean weight of a layer's places 1, at most 10: the unit in which corrections are fitted."""
    if not backs:
        return np.empty(0)
    return np.asarray(1.0 / np.maximum(np.abs(weight_F[1:]).reshape(backs, -1).mean(axis=1), 0.1))
