"""Measured attention times by (batch, length): prefill of `batch` prompts of `length`, or decode of `batch` sequences.

Along the length a monotone cubic through the logarithms (measured points come back exactly), between batch sizes a
straight line in the logarithms. Beyond the table time grows with the work: batch * length in decode, batch * length
squared in prefill; below it the edge is held.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.errors import UserError

Float = NDArray[np.float64]
SUBDIVISIONS = 8  # of every gap between measured lengths, when the cubic is tabulated


class AttentionTable:
    """points: (batch, length, us). power: of the length in the work, 1 for decode and 2 for prefill."""

    def __init__(self, points: Iterable[tuple[float, float, float]], power: int) -> None:
        table = np.array(sorted(points), dtype=np.float64)
        if table.ndim != 2 or table.shape[1] != 3 or (table <= 0).any():
            raise UserError("an attention table needs positive points of (batch, length, us)")
        self.power = power
        self._batch, lengths = np.unique(table[:, 0]), np.unique(table[:, 1])
        self._log_batch = np.log(self._batch)
        knots = np.log(lengths)
        steps = np.arange(SUBDIVISIONS) / SUBDIVISIONS
        self._log_length = np.append((knots[:-1, None] + steps * np.diff(knots)[:, None]).ravel(), knots[-1])
        self._log_us = np.stack([self._line(table[table[:, 0] == batch]) for batch in self._batch])

    def _line(self, points: Float) -> Float:
        """Log time of one batch size at every tabulated length."""
        from scipy.interpolate import PchipInterpolator  # slow to import, and needed only where there is a table

        x, y, at = np.log(points[:, 1]), np.log(points[:, 2]), self._log_length
        inside = np.clip(at, x[0], x[-1])
        cubic = PchipInterpolator(x, y)(inside) if len(x) > 1 else np.full_like(at, y[0])
        return np.asarray(cubic + self.power * np.maximum(at - x[-1], 0.0), dtype=np.float64)

    def time_us(self, batch: ArrayLike, length: ArrayLike) -> Float:
        """Microseconds; any shape. Nothing for an empty batch."""
        batch, length = np.asarray(batch, dtype=np.float64), np.asarray(length, dtype=np.float64)
        busy = (batch > 0) & (length > 0)
        b, n = np.log(np.where(busy, batch, 1.0)), np.log(np.where(busy, length, 1.0))
        i, u, past_b = _place(self._log_batch, b)
        j, v, past_n = _place(self._log_length, n)
        i1, j1 = np.minimum(i + 1, len(self._log_batch) - 1), np.minimum(j + 1, len(self._log_length) - 1)
        z = self._log_us
        inside = (1 - u) * ((1 - v) * z[i, j] + v * z[i, j1]) + u * ((1 - v) * z[i1, j] + v * z[i1, j1])
        return np.where(busy, np.exp(inside + past_b + self.power * past_n), 0.0)


def _place(knots: Float, x: Float) -> tuple[NDArray[np.int64], Float, Float]:
    """Index of the knot at or below x, share of the way to the next, and how far x lies beyond the last knot."""
    place = np.interp(x, knots, np.arange(len(knots)))
    index = place.astype(np.int64)
    return index, place - index, np.maximum(x - knots[-1], 0.0)
