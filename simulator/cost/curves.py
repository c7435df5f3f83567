"""Latency of a collective by message size: measured points, log-log in between.

Between two points the curve is the power law through them, so that protocol steps stay steps; below the smallest size
it is the measured floor; above the largest, the last two points give the bandwidth. Over a number of ranks that nobody
measured, it is interpolated in log(ranks) between the neighbours, or the nearest curve is used (extrapolated).
Worked example: points (1 MiB, 10 us), (4 MiB, 20 us); at 2 MiB the curve says sqrt(10 * 20) = 14.1 us.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.specs import Curve

Float = NDArray[np.float64]


class LatencyCurve:
    """One measured curve. Sizes in nccl-tests' count: the whole buffer of one rank, its own part included."""

    def __init__(self, curve: Curve) -> None:
        self.op, self.ranks = curve.op, curve.ranks
        self._bytes, self._us = np.array(curve.bytes), np.array(curve.latency_us)
        self._log_bytes, self._log_us = np.log(self._bytes), np.log(self._us)
        if len(self._bytes) > 1 and self._us[-1] > self._us[-2]:
            self._us_per_byte = (self._us[-1] - self._us[-2]) / (self._bytes[-1] - self._bytes[-2])
        else:
            self._us_per_byte = self._us[-1] / self._bytes[-1]

    @property
    def last_bytes(self) -> float:
        return float(self._bytes[-1])

    def time_us(self, size_bytes: ArrayLike) -> Float:
        """Microseconds for messages of these sizes; any shape. A size of 0 costs the floor."""
        size = np.asarray(size_bytes, dtype=np.float64)
        inside = np.exp(np.interp(np.log(np.maximum(size, 1.0)), self._log_bytes, self._log_us))
        return inside + np.maximum(size - self._bytes[-1], 0.0) * self._us_per_byte


class CurveSet:
    """All curves of a cluster, asked for by names in order of preference and number of ranks."""

    def __init__(self, curves: Iterable[Curve]) -> None:
        self._by_op: dict[str, dict[int, LatencyCurve]] = {}
        for curve in curves:
            self._by_op.setdefault(curve.op, {})[curve.ranks] = LatencyCurve(curve)

    def names(self) -> list[str]:
        return sorted(self._by_op)

    def pick(self, names: Iterable[str], ranks: int) -> Blend | None:
        """The first of these operations that was measured, over `ranks` ranks; None when none was."""
        for name in names:
            curves = self._by_op.get(name)
            if curves:
                return _blend(curves, ranks)
        return None

    def exact(self, names: Iterable[str], ranks: int) -> LatencyCurve | None:
        """A curve measured over exactly `ranks` ranks."""
        for name in names:
            if ranks in self._by_op.get(name, {}):
                return self._by_op[name][ranks]
        return None


class Blend:
    """One curve, or two weighed in log(ranks). `marks`: what to say about the numbers."""

    def __init__(self, low: LatencyCurve, high: LatencyCurve, weight: float, marks: frozenset[str]) -> None:
        self.low, self.high, self.weight, self.marks = low, high, weight, marks

    @property
    def last_bytes(self) -> float:
        return min(self.low.last_bytes, self.high.last_bytes)

    def time_us(self, size_bytes: ArrayLike) -> Float:
        low = self.low.time_us(size_bytes)
        if self.weight == 0.0:
            return low
        return np.exp((1 - self.weight) * np.log(low) + self.weight * np.log(self.high.time_us(size_bytes)))


def _blend(curves: dict[int, LatencyCurve], ranks: int) -> Blend:
    if ranks in curves:
        return Blend(curves[ranks], curves[ranks], 0.0, frozenset())
    below = [n for n in curves if n < ranks]
    above = [n for n in curves if n > ranks]
    if not below or not above:
        nearest = curves[max(below)] if below else curves[min(above)]
        return Blend(nearest, nearest, 0.0, frozenset({"extrapolated"}))
    low, high = max(below), min(above)
    return Blend(curves[low], curves[high], float(np.log(ranks / low) / np.log(high / low)), frozenset())
