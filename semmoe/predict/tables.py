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


@dataclass(frozen=True, eq=False)
class ScoreTables:
    """One layer. row_V: the token's row of every token id."""

    token: Rows
    row_V: NDArray[np.integer]
    chain: Chain
