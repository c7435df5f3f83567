"""Expert times measured by (tokens, active experts): a curve over tokens for each count of active experts.

The form of fused-MoE benchmarks: `tokens` with top_k experts each, of which `active` experts get any. Between two counts
of active experts the time is linear in them, as the weights that stream from memory are; outside it is held at the
table's edge in experts and follows the last curve's slope in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.errors import UserError
from semmoe.specs import Curve

from .curves import LatencyCurve

Float = NDArray[np.float64]


class ExpertTable:
    """points: (tokens, active experts, us)."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        table = np.array(sorted(points, key=lambda p: (p[1], p[0])), dtype=np.float64)
        if table.ndim != 2 or table.shape[1] != 3:
            raise UserError("an expert table needs points of (tokens, active experts, us)")
        self._active = np.unique(table[:, 1])
        self._curves = []
        for active in self._active:
            tokens, _, us = table[table[:, 1] == active].T
            self._curves.append(LatencyCurve(Curve(op="experts", ranks=0, bytes=tuple(tokens), latency_us=tuple(us))))

    def time_us(self, tokens: ArrayLike, active: ArrayLike) -> Float:
        """Microseconds; any shape, the same for both. Nothing for no tokens."""
        tokens = np.asarray(tokens, dtype=np.float64)
        active = np.asarray(active, dtype=np.float64)
        times = np.stack([curve.time_us(tokens) for curve in self._curves])  # [levels, ...]
        if len(self._active) == 1:
            return np.where(tokens > 0, times[0], 0.0)
        low = np.clip(np.searchsorted(self._active, active, side="right") - 1, 0, len(self._active) - 2)
        span = self._active[low + 1] - self._active[low]
        share = np.clip((active - self._active[low]) / span, 0.0, 1.0)
        below = np.take_along_axis(times, low[None], axis=0)[0]
        above = np.take_along_axis(times, low[None] + 1, axis=0)[0]
        return np.where(tokens > 0, (1 - share) * below + share * above, 0.0)
