"""Scores of every token before a layer from a predictor's tables, in plain torch: the twin of `harness.kernels.scores`.

Gathers, integers and one comparison of fp32 values that stand in the tables: every machine finds the same, and what
`predictor.scores` finds. Nothing reads the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.predict.tables import Rows, ScoreTables
from semmoe.schedule.priced import MOST_SPREAD


class LayerScores:
    """A predictor's scores before one layer, from tables that lie on `device` (semmoe/predict/tables.py)."""

    def __init__(self, tables: ScoreTables, device: torch.device) -> None:
        def put(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        chain = tables.chain
        _check_spread(tables.token, chain.rows)
        self.row_V = put(tables.row_V, torch.int32)
        self.token_SG, self.token_sure_S = (
            put(tables.token.score_SG, torch.int32),
            put(tables.token.sure_S, torch.float32),
        )
        self.chain_SG, self.chain_sure_S = put(chain.rows.score_SG, torch.int32), put(chain.rows.sure_S, torch.float32)
        self.held_PG = None if chain.held_PG is None else put(chain.held_PG, torch.int32)
        self.weight, self.drop, self.ranks = chain.weight, chain.drop, self.chain_SG.shape[1]

    def __call__(self, token_T: Tensor, slots_Tk: Tensor | None, earlier_row_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """(score_TG int32, chain_row_T int64). token_T: int64 ids; slots_Tk: integer slots that served the tokens in the
        layer before, and earlier_row_T: its chain_row_T; neither is looked at where nothing is looked back at."""
        chain_row_T = self._chain_row(token_T, slots_Tk, earlier_row_T)
        token_row_T = self.row_V.index_select(0, token_T)
        sure_T, chain_sure_T = (
            self.token_sure_S.index_select(0, token_row_T),
            self.chain_sure_S.index_select(0, chain_row_T),
        )
        token_TG, chain_TG = self.token_SG.index_select(0, token_row_T), self.chain_SG.index_select(0, chain_row_T)
        return torch.where((sure_T > chain_sure_T)[:, None], token_TG, chain_TG), chain_row_T

    def _chain_row(self, token_T: Tensor, slots_Tk: Tensor | None, earlier_row_T: Tensor | None) -> Tensor:
        if self.held_PG is None:
            return torch.zeros_like(token_T)
        assert slots_Tk is not None and earlier_row_T is not None
        held_TG = self.held_PG.index_select(0, slots_Tk.reshape(-1).long()).view(*slots_Tk.shape, self.ranks).sum(dim=1)
        lower_first_G = torch.arange(self.ranks - 1, -1, -1, device=token_T.device)
        device_T = (held_TG * self.ranks + lower_first_G).argmax(dim=1)  # no ties are left
        return device_T * self.weight + torch.div(earlier_row_T, self.drop, rounding_mode="floor")


def _check_spread(*tables: Rows) -> None:
    """What the kernel of home assignment cannot check without a read of the device."""
    lowest, highest = min(rows.score_SG.min() for rows in tables), max(rows.score_SG.max() for rows in tables)
    if int(highest) - int(lowest) >= MOST_SPREAD:
        raise UserError("a predictor's tables span 2^24 or more (256 assignments); token_scheduler=priced takes less")
