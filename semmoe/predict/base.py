"""The predictor protocol, and the base class of predictors that do not depend on a placement."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..placement.base import Placement
from ..profile import Profile

FIXED_POINT = 1 << 16


def quantise(score: NDArray[np.floating]) -> NDArray[np.int32]:
    """Scores as int32 fixed point (16 fractional bits), so that every machine and device breaks ties alike."""
    return np.rint(np.asarray(score) * FIXED_POINT).astype(np.int32)


class Predictor(Protocol):
    """A class with these methods, named by Hydra's `_target_`, is a predictor."""

    def fit(self, profile: Profile) -> None:
        """Learn from the training part; called once before any `scores`."""

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(score_TG, confidence_T): fixed-point expected local assignments of each token on each rank.

        history [T, lookback, k]: experts of the layers before, newest first, -1 where absent; None: no layer is known.
        """


class ExpertPredictor:
    """Implements `scores` for a predictor that gives `experts(...) -> [T, E]`, each row a distribution over experts."""

    top_k: int

    def experts(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None
    ) -> NDArray[np.float32]:
        raise NotImplementedError

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        share_TG = self.experts(token_ids_T, layer, history) @ placement.rank_mask_LEG[layer].astype(np.float32)
        return quantise(self.top_k * share_TG), share_TG.max(axis=1, initial=0.0)
