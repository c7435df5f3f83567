"""Device n-gram (the paper, section 3.2): the next rank of a token from the ranks of the layers before.

The device of a token in a layer is the rank that holds most of its k experts (ties: the lower rank). A row of the table
is the sequence of devices of the last n layers, newest first; its entries are the shares of choices that the rank
served then, smoothed towards the layer's marginal. The devices looked back at are real, from the experts that the
planner hands over.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..placement.base import Placement
from ..profile import Profile
from .base import quantise
from .tables import Chain, Rows, ScoreTables


class DeviceNgram:
    """Share of each rank given the devices of the last `lookback` layers (2 in the paper).

    pseudo: weight of the marginal in a row, in tokens."""

    def __init__(self, lookback: int = 2, pseudo: float = 5.0) -> None:
        if lookback < 1:
            raise UserError(f"predictor.lookback={lookback} must be at least 1")
        if not pseudo > 0:
            raise UserError(f"predictor.pseudo={pseudo} must be positive")
        self.lookback, self.pseudo = lookback, pseudo
        self._tables: tuple[Placement, list[NDArray[np.float32]]] | None = None

    def fit(self, profile: Profile) -> None:
        self.profile, self.top_k = profile, profile.trace.top_k
        self._tables = None

    def table_bytes(self, placement: Placement) -> int:
        return sum(table.nbytes for table in self._for(placement))

    def shares(self, layer: int, history: NDArray[np.integer] | None, placement: Placement, tokens: int) -> NDArray:
        """[T, G]: rows of the table; the marginal's row where a layer before is absent."""
        table_SG = self._for(placement)[layer]
        if history is None:
            return np.repeat(table_SG[-1:], tokens, axis=0)
        backs = min(self.lookback, layer)
        absent = (history[:, :backs] < 0).any(axis=(1, 2))
        row_T = np.zeros(tokens, dtype=np.int64)
        for back in range(backs):
            device_T = devices(np.maximum(history[:, back], 0), placement.rank_mask_LEG[layer - back - 1])
            row_T = row_T * placement.ep_size + device_T
        row_T[absent] = len(table_SG) - 1
        return table_SG[row_T]

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        share_TG = self.shares(layer, history, placement, len(token_ids_T))
        return quantise(self.top_k * share_TG), share_TG.max(axis=1, initial=0.0)

    def tables(self, layer: int, placement: Placement) -> ScoreTables:
        """Without the marginal's row: on a device no layer before is absent."""
        no_types_V = np.zeros(self.profile.trace.vocab_size, dtype=np.int32)
        return ScoreTables(Rows.never(placement.ep_size), no_types_V, self.chain(layer, placement))

    def chain(self, layer: int, placement: Placement) -> Chain:
        share_SG = self._for(placement)[layer][:-1]
        rows = Rows(quantise(self.top_k * share_SG), share_SG.max(axis=1))
        return Chain.over(rows, placement, layer, self.lookback)

    def _for(self, placement: Placement) -> list[NDArray[np.float32]]:
        if self._tables is None or self._tables[0] is not placement:
            trace, ranks = self.profile.trace, placement.ep_size
            masks = placement.rank_mask_LEG
            device_TL = np.stack([devices(trace.experts_TLk[:, i], masks[i]) for i in range(len(masks))], axis=1)
            tables = []
            for layer in range(placement.num_layers):
                served_TG = masks[layer][trace.experts_TLk[:, layer]].sum(axis=1).astype(np.float64)
                served_TG /= served_TG.sum(axis=1, keepdims=True)
                marginal_G = served_TG.mean(axis=0)
                backs = min(self.lookback, layer)
                row_T = np.zeros(trace.num_tokens, dtype=np.int64)
                for back in range(1, backs + 1):
                    row_T = row_T * ranks + device_TL[:, layer - back]
                rows = ranks**backs
                total_SG = np.stack([np.bincount(row_T, served_TG[:, g], rows) for g in range(ranks)], axis=1)
                seen_S = np.bincount(row_T, minlength=rows)[:, None]
                share_SG = (total_SG + self.pseudo * marginal_G) / (seen_S + self.pseudo)
                tables.append(np.vstack([share_SG, marginal_G]).astype(np.float32))
            self._tables = placement, tables
        return self._tables[1]


@numba.njit(cache=True)
def devices(experts_Tk, mask_EG):  # type: ignore[no-untyped-def]
    """Rank that holds most of each token's experts; ties to the lower rank."""
    device = np.empty(len(experts_Tk), dtype=np.int64)
    held = np.empty(mask_EG.shape[1], dtype=np.int64)
    for t in range(len(experts_Tk)):
        held[:] = 0
        for e in experts_Tk[t]:
            for g in range(len(held)):
                held[g] += mask_EG[e, g]
        device[t] = held.argmax()
    return device
