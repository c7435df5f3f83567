"""Fixtures that every package's tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from semmoe.trace import RoutingTrace

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def make_trace(
    requests: int = 12,
    tokens: int = 20,
    layers: int = 3,
    experts: int = 8,
    k: int = 2,
    vocab: int = 50,
    seed: int = 0,
    **changes: object,
) -> RoutingTrace:
    """Random routes whose experts lean on the token id, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    total = requests * tokens
    token_id = rng.integers(0, vocab, total)
    preference_VLE = np.random.default_rng(99).normal(size=(vocab, layers, experts)) * 2
    noise = rng.gumbel(size=(total, layers, experts))
    chosen = np.argsort(-(preference_VLE[token_id] + noise), axis=2)[:, :, :k]
    fields: dict = {
        "model": "toy",
        "num_experts": experts,
        "vocab_size": vocab,
        "experts_TLk": chosen,
        "token_id_T": token_id,
        "request_offset_R1": np.arange(requests + 1) * tokens,
        "prompt_len_R": np.full(requests, tokens // 2),
        "domain_R": np.array(["even", "odd"] * requests)[:requests],
        "layer_ids_L": np.arange(layers) + 1,
    }
    return RoutingTrace(**(fields | changes))


@pytest.fixture
def trace() -> RoutingTrace:
    return make_trace()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of public measured data; tests that need it skip where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"public data directory {SHARED_DATA.name} is not beside this checkout")
    return SHARED_DATA
