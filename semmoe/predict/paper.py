"""The paper's predictor (section 3.2): token table and device n-gram, whichever is more confident.

    dev = T[token] if T_p[token] > A_p[devices] else A[devices]

T_p and A_p are the largest share of a rank in the row of either table. Nothing is mixed; the winning row as a whole is
the score, so that a scheduler with capacities has more than one rank to choose from. T is not smoothed, as in the
paper; an unseen token has the marginal, or its nearest neighbour's row where the embedding is given. The look-back
uses real devices (the paper does not say which; real ones predict better).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..placement.base import Placement
from ..profile import Profile
from .device_ngram import DeviceNgram
from .tables import ScoreTables
from .token_table import TokenTable


class Paper:
    """Token table or 2-gram of devices, the row of higher confidence wins. kappa: smoothing of the token table in
    tokens (the paper has none)."""

    def __init__(self, lookback: int = 2, kappa: float = 1e-3, embedding: str | None = None) -> None:
        self.table = TokenTable(kappa, embedding)
        self.ngram = DeviceNgram(lookback, pseudo=1e-3)
        self.lookback = lookback

    def fit(self, profile: Profile) -> None:
        self.table.fit(profile)
        self.ngram.fit(profile)

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        token_TG, token_sure_T = self.table.scores(token_ids_T, layer, history, placement)
        if layer == 0 or history is None:
            return token_TG, token_sure_T
        chain_TG, chain_sure_T = self.ngram.scores(token_ids_T, layer, history, placement)
        first_T = token_sure_T > chain_sure_T
        return np.where(first_T[:, None], token_TG, chain_TG), np.where(first_T, token_sure_T, chain_sure_T)

    def tables(self, layer: int, placement: Placement) -> ScoreTables:
        token = self.table.tables(layer, placement)
        return replace(token, chain=self.ngram.chain(layer, placement)) if layer else token

    def request_scores(self, token_ids_T: NDArray[np.integer], placement: Placement) -> NDArray[np.int64]:
        """Expected local assignments of a prompt: the token table's, for no layer is known when a request arrives."""
        return self.table.request_scores(token_ids_T, placement)
