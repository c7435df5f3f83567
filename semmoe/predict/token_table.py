"""Token table: how often each token id activated each expert, smoothed (the paper's table T, section 3.2).

P[u, e] = (N_u p_u[e] + kappa p_0[e]) / (N_u + kappa), with N_u the training count of token type u, p_u its share of
choices that went to e and p_0 the same over all tokens: rare types lean on the marginal, unseen ones are the marginal
(or, where the model's embedding is given, the row of their nearest neighbour among the seen types).
A look-up is one gather from a table [U + 1, G] that is made once per layer and placement, in steps of 2^-16; rows over
experts, which only a measure of recall needs, keep their largest entries (compact.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..placement.base import Placement
from ..profile import Profile
from .base import FIXED_POINT, ExpertPredictor
from .compact import CompactRows
from .tables import Chain, Rows, ScoreTables
from .vocabulary import TypeRows


@dataclass(frozen=True, eq=False)
class _RankTables:
    """Shares of one placement's ranks in units of 2^-16 (k units are one of a score); row U is the unseen token."""

    share_LUG: NDArray[np.uint16]
    request_UG: NDArray[np.int64]  # scores summed over layers


class TokenTable(ExpertPredictor):
    """How often each token id activated each expert in training, smoothed towards the mean token.

    kappa: weight of the marginal, in tokens; embedding: see vocabulary.py; entries: experts that a row keeps (null: twice
    top-k).
    """

    lookback = 0

    def __init__(self, kappa: float = 2.0, embedding: str | None = None, entries: int | None = None) -> None:
        if not kappa > 0:
            raise UserError(f"predictor.kappa={kappa} must be positive (pseudo-count of the marginal)")
        if entries is not None and entries < 1:
            raise UserError(f"predictor.entries={entries} must be at least 1, or null for twice top-k")
        self.kappa, self.embedding, self.entries = kappa, embedding, entries
        self._tables: tuple[Placement, _RankTables] | None = None

    def fit(self, profile: Profile) -> None:
        self.profile = profile
        self.top_k = profile.trace.top_k
        self._types = TypeRows.fit(profile, self.embedding)
        self._tables = None
        self._rows: dict[int, CompactRows] = {}

    @property
    def table_bytes(self) -> int:
        """Bytes that look-ups touch: the vocabulary index and the score tables of the placement in use (without one,
        the expert rows made so far)."""
        if self._tables is None:
            return int(self._types.row_V.nbytes + sum(rows.nbytes for rows in self._rows.values()))
        return int(self._types.row_V.nbytes + self._tables[1].share_LUG.nbytes)

    def rows(self, token_ids_T: NDArray[np.integer]) -> NDArray[np.int32]:
        """Table row of every token (U for one that training never saw). UserError for an id outside the vocabulary."""
        return self._types.rows(token_ids_T)

    def experts(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None
    ) -> NDArray[np.float32]:
        """P [T, E]: each row sums to 1. Only the largest entries are kept as counted (compact.py)."""
        if layer not in self._rows:
            counts_UE, tokens_U = self.profile.token_counts_UE(layer), self.profile.token_count_U
            kept = self.entries or 2 * self.top_k
            prior_E = self._prior(layer)
            self._rows[layer] = CompactRows.of(counts_UE, tokens_U, self.top_k, self.kappa, kept, prior_E)
        return self._rows[layer].rows(self.rows(token_ids_T))

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        tables = self._for(placement)
        share_TG = tables.share_LUG[layer][self.rows(token_ids_T)]
        return share_TG * np.int32(self.top_k), share_TG.max(axis=1, initial=0) / np.float32(FIXED_POINT)

    def tables(self, layer: int, placement: Placement) -> ScoreTables:
        share_UG = self._for(placement).share_LUG[layer]
        token = Rows(share_UG * np.int32(self.top_k), share_UG.max(axis=1) / np.float32(FIXED_POINT))
        return ScoreTables(token, self._types.row_V, Chain(Rows.never(placement.ep_size)))

    def request_scores(self, token_ids_T: NDArray[np.integer], placement: Placement) -> NDArray[np.int64]:
        """score_G: fixed-point expected local assignments of these tokens on each rank, summed over layers."""
        tables = self._for(placement)
        return np.asarray(tables.request_UG[self.rows(token_ids_T)].sum(axis=0))

    def _prior(self, layer: int) -> NDArray[np.float64]:
        load_E = self.profile.load_LE[layer]
        return np.asarray(load_E / load_E.sum())

    def _for(self, placement: Placement) -> _RankTables:
        """The tables of this placement object; the last one is kept."""
        if self._tables is None or self._tables[0] is not placement:
            layers, types, ranks = placement.num_layers, len(self.profile.token_ids_U), placement.ep_size
            share = np.empty((layers, types + 1, ranks), dtype=np.uint16)
            for layer in range(layers):
                rank_shares(
                    self.profile.type_T,
                    self.profile.trace.experts_TLk[:, layer],
                    self.profile.token_count_U,
                    placement.rank_mask_LEG[layer],
                    self._prior(layer),
                    self.kappa,
                    share[layer],
                )
            self._tables = placement, _RankTables(share, self.top_k * share.sum(axis=0, dtype=np.int64))
        return self._tables[1]


@numba.njit(cache=True)
def rank_shares(type_T, experts_Tk, tokens_U, mask_EG, prior_E, kappa, share_UG):  # type: ignore[no-untyped-def]
    """Fill share_UG = round(2^16 sum of P over the experts of rank g), 2^16 - 1 for all of it.

    Sums run over integer counts, then one division: every machine gets the same shares.
    """
    tokens, k = experts_Tk.shape
    experts, ranks = mask_EG.shape
    types = len(tokens_U)
    local_UG = np.zeros((types + 1, ranks), dtype=np.int64)
    for t in range(tokens):
        for j in range(k):
            for g in range(ranks):
                if mask_EG[experts_Tk[t, j], g]:
                    local_UG[type_T[t], g] += 1
    prior_G = np.zeros(ranks, dtype=np.float64)
    for e in range(experts):
        for g in range(ranks):
            if mask_EG[e, g]:
                prior_G[g] += prior_E[e]
    for u in range(types + 1):
        seen = tokens_U[u] if u < types else 0
        for g in range(ranks):
            share = (local_UG[u, g] / k + kappa * prior_G[g]) / (seen + kappa)
            share_UG[u, g] = np.uint16(min(np.rint(share * FIXED_POINT), FIXED_POINT - 1))
