"""ScoreTables: a predictor of one layer as tables, so that a device finds with a few gathers what `scores` finds here.

    token   a row per token type, found by the token's id                                  (token_table.py)
    chain   a row per sequence of devices d_1, d_2, ... of the b layers before, newest first  (device_ngram.py);
            its number is d_1 G^(b-1) + ... + d_b, and follows from that of the layer before:
            row_T = d_1 * weight + earlier_row_T // drop

The row of higher confidence is the score, all of it, the chain's on a tie (paper.py); a part that a predictor lacks is one
row of confidence -1, which never wins. Scores are the int32 fixed point of everywhere. The device d_1 of a token is the rank
that holds most of the slots that served it in the layer before (ties: the lower rank); SAG carries them.

A predictor that is a look-up has `tables(layer, placement) -> ScoreTables`; then ranks can plan on the device
(measure.plan=device), with a plug-in's too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement.base import Placement


@dataclass(frozen=True, eq=False)
class Rows:
    """score_SG: int32, 16 fractional bits; sure_S: fp32, the confidence of each row."""

    score_SG: NDArray[np.int32]
    sure_S: NDArray[np.float32]

    @classmethod
    def never(cls, ranks: int) -> Rows:
        """One row that no other is less sure than."""
        return cls(np.zeros((1, ranks), dtype=np.int32), np.full(1, -1, dtype=np.float32))


@dataclass(frozen=True, eq=False)
class Chain:
    """rows: G^b; held_PG: whether a rank holds the expert of a slot in the layer before (None: b = 0, nothing is asked of it).
    weight, drop: see the module."""

    rows: Rows
    held_PG: NDArray[np.bool_] | None = None
    weight: int = 1
    drop: int = 1

    @classmethod
    def over(cls, rows: Rows, placement: Placement, layer: int, lookback: int) -> Chain:
        """The chain of `layer` over at most `lookback` layers."""
        if not min(lookback, layer):
            return cls(rows)
        digits, digits_before = min(lookback, layer), min(lookback, layer - 1)
        held_EG, expert_P = placement.rank_mask_LEG[layer - 1], placement.physical_to_logical_LP[layer - 1]
        ranks = placement.ep_size
        return cls(rows, held_EG[expert_P], ranks ** (digits - 1), ranks ** (digits_before - digits + 1))

    def rows_T(self, tokens: int, slots_Tk: NDArray[np.integer], earlier_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of every token."""
        if self.held_PG is None:
            return np.zeros(tokens, dtype=np.int64)
        device_T = self.held_PG[slots_Tk].sum(axis=1).argmax(axis=1)
        return device_T * self.weight + earlier_T // self.drop


@dataclass(frozen=True, eq=False)
class ScoreTables:
    """One layer. row_V: the token's row of every token id."""

    token: Rows
    row_V: NDArray[np.integer]
    chain: Chain

    def scores(
        self, token_ids_T: NDArray[np.integer], slots_Tk: NDArray[np.integer], earlier_row_T: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(score_TG, row_T of the chain): the reference of `harness.kernels.scores`. slots_Tk, earlier_row_T: the slots of the
        layer before and its row_T, not looked at where the chain asks nothing of it."""
        chain_T, token_T = self.chain.rows_T(len(token_ids_T), slots_Tk, earlier_row_T), self.row_V[token_ids_T]
        first_T = self.token.sure_S[token_T] > self.chain.rows.sure_S[chain_T]
        return np.where(first_T[:, None], self.token.score_SG[token_T], self.chain.rows.score_SG[chain_T]), chain_T

    def spread(self) -> int:
        """Between the highest and the lowest score of any row."""
        tables = (self.token.score_SG, self.chain.rows.score_SG)
        return max(int(table.max()) for table in tables) - min(int(table.min()) for table in tables)
