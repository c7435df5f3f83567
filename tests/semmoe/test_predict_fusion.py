"""Fusion: features without the own request, fitted weights, scores, unseen tokens, speed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.predict.fusion import Fusion
from semmoe.predict.fusion_fit import fit_weights, softmax
from semmoe.predict.fusion_kernel import STEP
from semmoe.predict.fusion_refine import columns, entropy_and_slope
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.sources.synthetic import Synthetic
from semmoe.trace import RoutingTrace

REAL = Synthetic(
    requests=16, prompt_len=50, output_len=10, num_experts=16, top_k=3, layers=4, groups=4, topics=4, vocab_size=200
).make()
TRAIN, TEST = REAL.select(np.arange(10)), REAL.select(np.arange(10, 16))


def history_of(trace: RoutingTrace, layer: int, lookback: int = 2) -> np.ndarray:
    history = np.full((trace.num_tokens, lookback, trace.top_k), -1, dtype=np.int16)
    for back in range(1, min(lookback, layer) + 1):
        history[:, back - 1] = trace.experts_TLk[:, layer - back]
    return history


def fitted(trace: RoutingTrace = TRAIN, **options: object) -> Fusion:
    fusion = Fusion(**options)  # type: ignore[arg-type]
    fusion.fit(Profile.fit(trace))
    return fusion


FUSION = fitted()


def cross_entropy(q_TE: np.ndarray, experts_Tk: np.ndarray) -> float:
    return float(-np.log(np.take_along_axis(q_TE, experts_Tk.astype(np.int64), axis=1)).mean())


def chained(requests: int = 8, tokens: int = 60, experts: int = 8, seed: int = 0) -> RoutingTrace:
    """Layer 1 repeats the expert of layer 0, shifted by one; the token id says nothing."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, experts, requests * tokens)
    routes = np.stack([first, (first + 1) % experts], axis=1)[:, :, None]
    return RoutingTrace(
        model="chain",
        num_experts=experts,
        vocab_size=20,
        experts_TLk=routes,
        token_id_T=rng.integers(0, 20, requests * tokens),
        request_offset_R1=np.arange(requests + 1) * tokens,
        prompt_len_R=np.full(requests, tokens),
        domain_R=np.array(["d"] * requests),
        layer_ids_L=np.arange(2),
    )


def test_rows_are_distributions_and_scores_their_sums_over_ranks() -> None:
    for slots in (16, 24):
        physical = np.concatenate([np.arange(16), np.arange(slots - 16)])
        placement = Placement(np.tile(np.random.default_rng(1).permutation(physical), (4, 1)), 4, (0, 1, 2, 3), 16)
        for layer in range(4):
            history = history_of(TEST, layer)
            q_TE = FUSION.experts(TEST.token_id_T, layer, history)
            np.testing.assert_allclose(q_TE.sum(axis=1), 1, rtol=1e-5)
            score_TG, best_T = FUSION.scores(TEST.token_id_T, layer, history, placement)
            share_TG = q_TE @ placement.rank_mask_LEG[layer]
            np.testing.assert_allclose(score_TG / 65536, 3 * share_TG, atol=1e-4)
            np.testing.assert_allclose(best_T, share_TG.max(axis=1), atol=1e-5)


def test_q_is_the_formula_of_the_module() -> None:
    layer, table = 2, FUSION.layers[2]
    history = history_of(TEST, layer)[:5]
    row_T = FUSION.types.rows(TEST.token_id_T[:5])
    z = table.bias_E + table.weight_F[0] * STEP * table.token_UE[row_T]
    for b in range(2):
        for i in range(3):
            z = z + table.weight_F[1 + 3 * b + i] * table.lift_B2EE[b, min(i, 1), history[:, b, i]]
    np.testing.assert_allclose(FUSION.experts(TEST.token_id_T[:5], layer, history), softmax(z), rtol=1e-4)


def test_features_of_a_request_come_from_tables_without_it() -> None:
    rows = np.flatnonzero(TRAIN.request_T == 4)[::3]
    without = Profile.fit(TRAIN.select(np.array([r for r in range(10) if r != 4])))
    other = Fusion()
    other.fit(without)
    left = FUSION._features(3)[np.isin(FUSION.fit_rows_S, rows)][:, 1]
    before = TRAIN.experts_TLk[rows, 2, 0]

    def log_q(fusion: Fusion, lift: np.ndarray) -> np.ndarray:  # without the marginal p0, which keeps the request
        return np.asarray(lift + np.log(fusion._prior(3)))

    wanted = log_q(other, other._lifts(3, 2, other._prior(3))[0][before])
    in_sample = log_q(FUSION, FUSION._lifts(3, 2, FUSION._prior(3))[0][before])
    np.testing.assert_allclose(log_q(FUSION, left), wanted, atol=0.06)
    assert np.abs(in_sample - wanted).max() > 0.2  # negative control


def test_left_out_rows_predict_their_tokens_as_badly_as_unseen_ones() -> None:
    rows_S, q_SE = FUSION.left_out(2)
    np.testing.assert_allclose(q_SE.sum(axis=1), 1.0, atol=2e-3)
    experts_Sk = TRAIN.experts_TLk[rows_S, 2]
    left = cross_entropy(q_SE, experts_Sk)
    in_sample = cross_entropy(FUSION.experts(TRAIN.token_id_T, 2, history_of(TRAIN, 2))[rows_S], experts_Sk)
    heldout = cross_entropy(FUSION.experts(TEST.token_id_T, 2, history_of(TEST, 2)), TEST.experts_TLk[:, 2])
    assert in_sample < left - 0.02  # in-sample rows flatter themselves
    assert abs(left - heldout) < heldout - in_sample


def test_many_requests_leave_the_tables_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semmoe.predict.fusion.BLOCKS", 4)  # of 10 requests: blocks of 3
    features = FUSION._features(2)
    others = TRAIN.select(np.array([0, 1, 2, 6, 7, 8, 9]))
    tokens, top_k, prior_E = others.token_id_T, others.top_k, FUSION._prior(2)
    s = int(np.flatnonzero(TRAIN.request_T[FUSION.fit_rows_S] == 4)[0])
    same = tokens == TRAIN.token_id_T[FUSION.fit_rows_S[s]]
    counts_E = np.bincount(others.experts_TLk[same, 2].ravel(), minlength=16)
    share_E = (counts_E / top_k + 2.0 * FUSION._back_off(2, prior_E)) / (same.sum() + 2.0)
    np.testing.assert_allclose(features[s, 0], np.log(share_E / prior_E), rtol=1e-4, atol=1e-5)


def test_tables_are_as_before_after_the_features_were_taken() -> None:
    profile = FUSION.profile
    before = profile.token_count_U.copy()
    FUSION._features(1)
    assert np.array_equal(profile.token_count_U, before)


def test_the_layer_before_is_used_where_the_token_says_nothing() -> None:
    trace = chained()
    test = chained(seed=1)
    fusion = fitted(trace)
    q_TE = fusion.experts(test.token_id_T, 1, history_of(test, 1))
    assert (q_TE.argmax(axis=1) == test.experts_TLk[:, 1, 0]).mean() > 0.99
    blind = fitted(trace, lookback=0).experts(test.token_id_T, 1, None)
    assert (blind.argmax(axis=1) == test.experts_TLk[:, 1, 0]).mean() < 0.3  # negative control


def test_fusion_predicts_unseen_requests_better_than_the_token_table() -> None:
    table = TokenTable()
    table.fit(Profile.fit(TRAIN))
    for layer in (1, 2, 3):
        fused = cross_entropy(
            FUSION.experts(TEST.token_id_T, layer, history_of(TEST, layer)), TEST.experts_TLk[:, layer]
        )
        alone = cross_entropy(table.experts(TEST.token_id_T, layer, None), TEST.experts_TLk[:, layer])
        assert fused < alone


def test_absent_history_is_the_token_alone() -> None:
    absent = np.full((4, 2, 3), -1, dtype=np.int16)
    ids = TEST.token_id_T[:4]
    assert np.array_equal(FUSION.experts(ids, 2, absent), FUSION.experts(ids, 2, None))


def test_corrections_predict_unseen_requests_better() -> None:
    plain = fitted(refine=0.0)
    for layer in (1, 2, 3):
        history, experts_Tk = history_of(TEST, layer), TEST.experts_TLk[:, layer]
        refined = cross_entropy(FUSION.experts(TEST.token_id_T, layer, history), experts_Tk)
        before = cross_entropy(plain.experts(TEST.token_id_T, layer, history), experts_Tk)
        assert refined < before + 0.005


def test_the_slope_of_the_corrections_is_that_of_their_loss() -> None:
    rng = np.random.default_rng(0)
    start, scale = rng.normal(size=(20, 5)).astype(np.float32), np.array([1.3, 0.7], dtype=np.float32)
    column = columns(rng.integers(0, 5, (1, 20, 2)), 5)
    chosen = np.stack([rng.permutation(5)[:2] for _ in range(20)])
    at = rng.normal(size=(10, 5)).astype(np.float32)
    _, slope = entropy_and_slope(start, column, scale, chosen, at)
    for row, e in ((0, 1), (3, 4), (7, 0)):
        up, down = at.copy(), at.copy()
        up[row, e] += 0.01
        down[row, e] -= 0.01
        rise = (
            entropy_and_slope(start, column, scale, chosen, up)[0]
            - entropy_and_slope(start, column, scale, chosen, down)[0]
        )
        assert rise / 0.02 == pytest.approx(slope[row, e], abs=2e-4)
    assert columns(np.array([[[3, 1]]]), 4).tolist() == [[3, 5]]


def test_newton_finds_the_weights_that_made_the_data() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(4000, 2, 6)).astype(np.float32)
    q = softmax(features[:, 0] * 0.7 + features[:, 1] * -0.3)
    choice = (q.cumsum(axis=1) < rng.random((4000, 1))).sum(axis=1)
    hits = (choice[:, None] == np.arange(6)).astype(float)
    weight, bias, entropy = fit_weights(features, hits, np.full(6, 1 / 6), np.zeros(2), ridge=1e-6)
    np.testing.assert_allclose(weight, [0.7, -0.3], atol=0.08)
    np.testing.assert_allclose(bias - bias.mean(), 0, atol=0.15)
    assert entropy < np.log(6)


def test_512_tokens_of_a_layer_are_scored_within_a_millisecond_or_two() -> None:
    placement = Placement.from_ranks(np.tile(np.arange(16) // 4, (4, 1)), 4, (0, 1, 2, 3))
    ids, history = np.resize(TEST.token_id_T, 512), np.resize(history_of(TEST, 3), (512, 2, 3))
    FUSION.scores(ids, 3, history, placement)
    best = np.inf
    for _ in range(10):
        start = time.perf_counter()
        FUSION.scores(ids, 3, history, placement)
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3


def test_bad_parameters_are_named() -> None:
    with pytest.raises(UserError, match=r"predictor\.lookback=3 must be 0, 1 or 2"):
        Fusion(lookback=3)
    with pytest.raises(UserError, match=r"predictor\.kappa=0"):
        Fusion(kappa=0)
    with pytest.raises(UserError, match="outside the vocabulary of 200"):
        FUSION.experts(np.array([200]), 0, None)
