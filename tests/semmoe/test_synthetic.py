"""Synthetic traces: the planted optimum, the dials, and that different seeds and requests differ."""

from __future__ import annotations

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.sources.synthetic import Synthetic
from semmoe.trace import RoutingTrace

SHAPE = {"num_experts": 32, "top_k": 3, "layers": 4, "groups": 4, "topics": 8, "vocab_size": 400, "prompt_len": 40}


def make(**dials: object) -> tuple[Synthetic, RoutingTrace]:
    source = Synthetic(**{"requests": 200, "output_len": 10, **SHAPE, **dials})  # type: ignore[arg-type]
    return source, source.make()


def planted_rank_TLk(source: Synthetic, trace: RoutingTrace) -> np.ndarray:
    return source.planted_rank_LE[np.arange(trace.num_layers)[:, None], trace.experts_TLk]


def planted_lar_L(source: Synthetic, trace: RoutingTrace) -> np.ndarray:
    home_T = source.planted_home_T(trace)
    return np.asarray((planted_rank_TLk(source, trace) == home_T[:, None, None]).mean(axis=(0, 2)))


def test_without_noise_the_planted_optimum_is_all_local() -> None:
    source, trace = make(context_noise=0.0, depth_fade=0.0)
    assert (planted_lar_L(source, trace) == 1).all()
    assert (np.bincount(source.planted_rank_LE[0]) == 8).all()


def test_noise_and_fade_lower_locality_by_the_stated_formula() -> None:
    source, trace = make(context_noise=0.2, depth_fade=0.5, load_skew=1.6)
    np.testing.assert_allclose(planted_lar_L(source, trace), source.planted_lar_L, atol=0.02)
    assert source.planted_lar_L[0] == pytest.approx(1 - 0.2 * (1 - (0.4**2 + 3 * 0.2**2)))
    assert np.diff(planted_lar_L(source, trace)).max() < 0


@pytest.mark.parametrize("skew", [1.0, 1.5, 2.5])
@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_the_asked_for_skew_is_the_load_of_the_planted_ranks(skew: float, noise: float) -> None:
    source, trace = make(load_skew=skew, context_noise=noise)
    for layer in range(4):
        load_G = np.bincount(planted_rank_TLk(source, trace)[:, layer].ravel(), minlength=4)
        assert load_G[0] / load_G.mean() == pytest.approx(skew, rel=0.05)
        np.testing.assert_allclose(load_G / load_G.sum(), source.share_G, atol=0.02)


def test_requests_of_one_topic_share_a_home_when_pure() -> None:
    source, trace = make(topic_purity=1.0, context_noise=0.0, depth_fade=0.0)
    home_T = source.planted_home_T(trace)
    for r in range(20):
        own = home_T[trace.request_T == r]
        assert (own == own[0]).all()
    _, mixed = make(topic_purity=0.0)
    assert len(np.unique(source.planted_home_T(mixed)[mixed.request_T == 0])) > 1


def recall(trace: RoutingTrace) -> float:
    """Share of choices among the top_k most frequent experts of their token type, mean over layers."""
    hits = []
    for layer in range(trace.num_layers):
        counts = np.zeros((trace.vocab_size, trace.num_experts))
        np.add.at(counts, (np.repeat(trace.token_id_T, trace.top_k), trace.experts_TLk[:, layer].ravel()), 1)
        hits.append(np.sort(counts, axis=1)[:, -trace.top_k :].sum() / counts.sum())
    return float(np.mean(hits))


def test_concentration_raises_recall_up_to_certainty() -> None:
    values = [recall(make(concentration=c, context_noise=0.0, depth_fade=0.0)[1]) for c in (0.0, 0.7, 1.0)]
    assert values[0] + 0.1 < values[1] < values[2] - 0.05
    assert values[2] == 1.0


def test_zipf_exponent_skews_the_token_frequencies() -> None:
    def top_share(zipf: float) -> float:
        counts = np.sort(np.bincount(make(zipf=zipf)[1].token_id_T, minlength=400))[::-1]
        return float(counts[:40].sum() / counts.sum())

    assert top_share(0.0) < 0.2 < 0.5 < top_share(1.5)


def test_drift_moves_token_types_of_the_later_domain_only() -> None:
    source, trace = make(drift=0.5, context_noise=0.0, depth_fade=0.0)
    later_R = np.char.endswith(trace.domain_R, "/later")
    assert later_R.tolist() == [False] * 100 + [True] * 100
    assert (planted_lar_L(source, trace) == 1).all()
    rank_TLk = planted_rank_TLk(source, trace)[:, 0, 0]
    is_late_T = later_R[trace.request_T]
    before, after = (
        dict(zip(trace.token_id_T[part].tolist(), rank_TLk[part].tolist(), strict=True))
        for part in (~is_late_T, is_late_T)
    )
    moved = np.mean([before[v] != after[v] for v in before.keys() & after.keys()])
    assert 0.35 < moved < 0.65


def test_deterministic_per_seed_and_different_between_requests_and_seeds() -> None:
    _, one = make(seed=3)
    _, same = make(seed=3)
    _, other = make(seed=4)
    assert one.digest == same.digest != other.digest
    streams = {one.experts_TLk[one.request_T == r].tobytes() for r in range(one.num_requests)}
    assert len(streams) == one.num_requests


def test_the_trace_is_valid_and_as_long_as_asked(tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, trace = make(length_spread=0.5, first_layer=2, model="some-model")
    assert trace.layer_ids_L.tolist() == [2, 3, 4, 5]
    assert trace.length_R.mean() == pytest.approx(50, rel=0.15)
    assert trace.length_R.std() > 10
    trace.save(tmp_path / "t.npz")
    assert RoutingTrace.load(tmp_path / "t.npz").digest == trace.digest


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"requests": 0}, "requests=0 must be at least 1"),
        ({"context_noise": 1.5}, r"context_noise=1\.5 must lie in 0\.\.1"),
        ({"groups": 16}, "groups=16 must divide num_experts=32 into blocks of at least top_k=3"),
        ({"topics": 2}, "topics=2 must lie between groups=4"),
        ({"load_skew": 5.0}, r"load_skew=5\.0 must lie in 1\.\.groups=4"),
    ],
)
def test_bad_dials_are_explained(dials: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Synthetic(**{**SHAPE, **dials})  # type: ignore[arg-type]


def test_the_local_rate_dial_is_the_lar_of_requests_at_home() -> None:
    """experiment=micro: contiguous experts, every request at the rank that it asks for; fixed batches in dp."""
    for rate in (0.25, 0.6, 0.9):
        overrides = ["experiment=micro", f"trace.local_rate={rate}", "flow=dp", "dispatcher=a2a_dedup"]
        config = compose_all([*overrides, "request_scheduler=oracle", "trace.requests=32"])[0]
        run = RunBuilder().build(config)
        meter = run.recipe.locality(run.fitted, run.heldout, 512)
        assert meter.columns()["lar"] == pytest.approx(rate, abs=0.02)
    with pytest.raises(UserError, match=r"local_rate=0\.2 must lie in 0\.25"):
        Synthetic(groups=4, local_rate=0.2)
