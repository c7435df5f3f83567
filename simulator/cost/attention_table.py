"""Measured attention times by (batch, length): prefill of `batch` prompts of `length`, or decode of `batch` sequences.

Along the length a monotone cubic through the logarithms (measured points come back exactly), between batch sizes a
straight line in the logarithms. Beyond the table time grows with the work: batch * length in decode, batch * length
squared in prefill; below it the edge is held.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
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
        batch, length = np.broadcast_arrays(batch, length)
        points = batch.ravel(), length.ravel()
        return np.asarray(_time_us(*points, self._log_batch, self._log_length, self._log_us, self.power)).reshape(
            batch.shape
        )


@numba.njit(cache=True)
def _time_us(batch_N, length_N, log_batch, log_length, log_us, power):  # type: ignore[no-untyped-def]
    made = np.zeros(len(batch_N))
    for at in range(len(batch_N)):
        if batch_N[at] > 0 and length_N[at] > 0:
            i, i1, u, past_b = _place(log_batch, np.log(batch_N[at]))
            j, j1, v, past_n = _place(log_length, np.log(length_N[at]))
            low = (1 - v) * log_us[i, j] + v * log_us[i, j1]
            high = (1 - v) * log_us[i1, j] + v * log_us[i1, j1]
            made[at] = np.exp((1 - u) * low + u * high + past_b + power * past_n)
    return made


@numba.njit(cache=True)
def _place(knots, x):  # type: ignore[no-untyped-def]
    """The knots around x, share of the way from the one to the other, and how far x lies beyond the last."""
    right = min(np.searchsorted(knots, x), len(knots) - 1)
    left = max(right - 1, 0)
    gap = knots[right] - knots[left]
    share = min(max((x - knots[left]) / gap, 0.0), 1.0) if gap > 0 else 0.0
    return left, right, share, max(x - knots[-1], 0.0)
