"""Latency of a collective by message size: measured points, and in between the law that they scatter around.

A transfer takes floor + bytes / bandwidth: the line through the smallest size's latency and the largest size's
bandwidth. Between two points the measured multiple of that line is interpolated, both axes logarithmic, so that points
come back exactly and protocol steps stay steps. Why not the latency itself, log-log (a power law): with every other size
left out its median error is 3.7 % and here 2.7 %, above 1 MiB 4.0 % and 2.5 % (90th percentile 13 % both, NCCL tables of all
systems; the other half of the sizes: 3.9 and 2.7 %, 5.3 and 2.8 %). A straight line and monotone cubics were no better.
Below the smallest size the curve is the measured
floor; above the largest, the last two points give the bandwidth. Over a number of ranks that nobody measured, it is
interpolated in log(ranks) between the neighbours, or the nearest curve is used (extrapolated) at the size with the same
egress, which is (n - 1) / n of the buffer: 8 ranks from 4, above 1 MiB, median error 8 % instead of 10 % at the same size.
Worked example: points (1 MB, 10 us), (4 MB, 28 us), line 10 us + 7 us/MB: multiples 10/17 and 28/38; at 2 MB the curve
says (10 + 14) * sqrt(10/17 * 28/38) = 15.8 us.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.specs import Curve

Float = NDArray[np.float64]


class LatencyCurve:
    """One measured curve. Sizes in nccl-tests' count: the whole buffer of one rank, its own part included."""

    def __init__(self, curve: Curve) -> None:
        self.op, self.ranks = curve.op, curve.ranks
        self._bytes, self._us = np.array(curve.bytes), np.array(curve.latency_us)
        self._floor_us, self._line = self._us[0], self._us[-1] / self._bytes[-1]
        self._log_bytes, self._ends = np.log(self._bytes), (self._bytes[0], self._bytes[-1])
        self._log_multiple = np.log(self._us / (self._floor_us + self._bytes * self._line))
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
        law = (self._floor_us, self._line, self._us_per_byte)
        return np.asarray(
            _time_us(size.reshape(-1), self._log_bytes, self._log_multiple, self._ends, law).reshape(size.shape)
        )


@numba.njit(cache=True)
def _time_us(size_N, log_bytes, log_multiple, ends, law):  # type: ignore[no-untyped-def]
    floor_us, us_per_byte, us_per_byte_beyond = law
    made = np.empty(len(size_N))
    for n in range(len(size_N)):
        inside = min(max(size_N[n], ends[0]), ends[1])
        at = np.log(inside)
        right = 0
        for knot in range(len(log_bytes) - 1):  # a search by halves would mispredict every branch
            right += log_bytes[knot] < at
        left = max(right - 1, 0)
        gap = log_bytes[right] - log_bytes[left]
        share = (at - log_bytes[left]) / gap if gap > 0 else 0.0
        multiple = np.exp(log_multiple[left] + share * (log_multiple[right] - log_multiple[left]))
        made[n] = (floor_us + inside * us_per_byte) * multiple + max(size_N[n] - ends[1], 0.0) * us_per_byte_beyond
    return made


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
    """One curve, or two weighed in log(ranks). scale: of sizes before they are looked up. `marks`: about the numbers."""

    def __init__(
        self,
        low: LatencyCurve,
        high: LatencyCurve,
        weight: float = 0.0,
        scale: float = 1.0,
        marks: frozenset[str] = frozenset(),
    ) -> None:
        self.low, self.high, self.weight, self.scale, self.marks = low, high, weight, scale, marks

    @property
    def last_bytes(self) -> float:
        return min(self.low.last_bytes, self.high.last_bytes) / self.scale

    def time_us(self, size_bytes: ArrayLike) -> Float:
        size = np.asarray(size_bytes, dtype=np.float64) * self.scale
        low = self.low.time_us(size)
        if self.weight == 0.0:
            return low
        return np.exp((1 - self.weight) * np.log(low) + self.weight * np.log(self.high.time_us(size)))


def _blend(curves: dict[int, LatencyCurve], ranks: int) -> Blend:
    if ranks in curves:
        return Blend(curves[ranks], curves[ranks])
    below = [n for n in curves if n < ranks]
    above = [n for n in curves if n > ranks]
    if not below or not above:
        known = max(below) if below else min(above)
        same_egress = (ranks - 1) / ranks * known / (known - 1) if min(ranks, known) > 1 else 1.0
        return Blend(curves[known], curves[known], scale=same_egress, marks=frozenset({"extrapolated"}))
    low, high = max(below), min(above)
    return Blend(curves[low], curves[high], float(np.log(ranks / low) / np.log(high / low)))
