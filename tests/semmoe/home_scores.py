"""Scores of tokens for ranks, of kinds that home assignment finds easy and hard."""

from __future__ import annotations

import numpy as np

KINDS = ("random", "skewed", "clustered", "tied", "equal")


def scores(kind: str, tokens: int, ranks: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, tokens, ranks])
    if kind == "tied":
        made = rng.integers(0, 4, (tokens, ranks)) / 4
    elif kind == "equal":
        made = np.ones((tokens, ranks))
    elif kind == "clustered":
        weight_G = np.linspace(1, 5, ranks) / np.linspace(1, 5, ranks).sum()
        made = np.eye(ranks)[rng.choice(ranks, tokens, p=weight_G)] * 2 + rng.gamma(1, 0.5, (tokens, ranks))
    else:
        made = rng.random((tokens, ranks)) * (np.linspace(0.3, 1.5, ranks) if kind == "skewed" else 1)
    return np.rint(made * 2**17).astype(np.int32)
