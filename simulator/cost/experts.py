"""Time of one rank's experts, by rows and active experts (DESIGN section 6).

    time = floor + max( active * expert_bytes / (eta * memory_bw),  rows * 6 * hidden * ffn / (mfu(rows/active) * flops) )
    mfu(r) = max_mfu * r / (r + half_rows)

so the second term is (rows + active * half_rows) * 6 * hidden * ffn / (max_mfu * flops): linear in both, and a rank
with few rows an expert pays for the tiles that it cannot fill. A rank without rows pays nothing.
Worked example: floor 40 us, 128 active experts of 9.44 MB, 3350 GB/s at eta 0.85: 40 + 424 = 464 us while memory rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec, ModelSpec

Float = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertLaw:
    """The closed form. memory_gbps and tflops are peaks; eta, mfu and floor are fitted or assumed."""

    memory_gbps: float
    tflops: float
    memory_efficiency: float
    max_mfu: float
    half_rows: float
    floor_us: float

    def time_us(self, rows: ArrayLike, active: ArrayLike, hidden: int, ffn: int, expert_bytes: float) -> Float:
        """Microseconds for `rows` rows over `active` experts; any shape."""
        rows, active = np.asarray(rows, dtype=np.float64), np.asarray(active, dtype=np.float64)
        memory = active * (expert_bytes / (self.memory_efficiency * self.memory_gbps * 1e3))
        compute = (rows + active * self.half_rows) * (6.0 * hidden * ffn / (self.max_mfu * self.tflops * 1e6))
        return np.where(rows > 0, self.floor_us + np.maximum(memory, compute), 0.0)


def fit_expert_law(
    points: list[tuple[float, float, float]],
    hidden: int,
    ffn: int,
    memory_gbps: float,
    tflops: float,
    expert_bytes: float | None = None,
) -> ExpertLaw:
    """The law that fits (rows, active, us) points best in relative terms (robust least squares); experts of BF16 by default."""
    from scipy.optimize import least_squares

    rows, active, us = np.array(points, dtype=np.float64).T

    def law(x: Float) -> ExpertLaw:
        return ExpertLaw(memory_gbps, tflops, x[0], x[1], float(np.exp(x[2])), float(np.exp(x[3])))

    def error(x: Float) -> Float:
        return np.log(law(x).time_us(rows, active, hidden, ffn, expert_bytes or 6.0 * hidden * ffn) / us)

    fits = [
        least_squares(
            error, (0.8, 0.5, np.log(half), np.log(30.0)), bounds=((0.2, 0.05, 0, 0), (1.1, 0.95, 7, 6)), loss="soft_l1"
        )
        for half in (10.0, 40.0, 150.0)
    ]
    return law(min(fits, key=lambda fit: fit.cost).x)


class ExpertTimes:
    """Expert time of every rank and layer of one model on one cluster.

    A calibrated cluster has an `expert_grid` of (rows, active, us); it rules where it was measured for this model's
    shape (`expert_grid_shape` = (hidden, ffn)), the closed form elsewhere.
    """

    def __init__(self, cluster: ClusterSpec, model: ModelSpec) -> None:
        fp8 = model.expert_dtype == "fp8" and cluster.fp8_tflops > 0
        self.law = ExpertLaw(
            cluster.memory_gbps,
            cluster.fp8_tflops if fp8 else cluster.bf16_tflops,
            cluster.memory_efficiency,
            cluster.max_mfu,
            cluster.mfu_half_rows,
            cluster.expert_floor_us,
        )
        self.model = model
        shape = (model.hidden, model.expert_ffn)
        usable = bool(cluster.expert_grid) and tuple(cluster.expert_grid_shape or shape) == shape
        self.grid = ExpertGrid(cluster.expert_grid, cluster.name) if usable else None
        said = cluster.provenance.get("experts", cluster.provenance.get("all", "assumed"))
        self.provenance = "interpolated" if self.grid else said.split()[0].rstrip(":")

    def time_us(self, rows_LG: NDArray[np.integer], active_LG: NDArray[np.integer]) -> Float:
        if self.grid is not None:
            return self.grid.time_us(rows_LG, active_LG)
        return self.law.time_us(rows_LG, active_LG, self.model.hidden, self.model.expert_ffn, self.model.expert_bytes)


class ExpertGrid:
    """Measured times on a grid of active experts x rows per active expert, bilinear in the logarithms.

    Points are hit exactly. Outside: time grows in proportion to rows above the grid and stays at the edge below it.
    """

    def __init__(self, points: tuple[tuple[float, float, float], ...], where: str) -> None:
        table = np.array(points, dtype=np.float64)
        active, per_expert = table[:, 1], table[:, 0] / table[:, 1]
        self._active = np.unique(active)
        self._per_expert = np.unique(per_expert.round(9))
        cells = np.full((len(self._active), len(self._per_expert)), np.nan)
        cells[np.searchsorted(self._active, active), np.searchsorted(self._per_expert, per_expert.round(9))] = table[
            :, 2
        ]
        if np.isnan(cells).any() or (cells <= 0).any():
            raise UserError(
                f"cluster {where}: expert_grid must hold a positive time for every pair of active experts "
                f"{self._active.tolist()} and rows per active expert {self._per_expert.tolist()}"
            )
        self._log_us = np.log(cells)

    def time_us(self, rows: ArrayLike, active: ArrayLike) -> Float:
        rows, active = np.asarray(rows, dtype=np.float64), np.asarray(active, dtype=np.float64)
        busy = rows > 0
        a = np.where(busy, active, 1.0)
        r = np.where(busy, rows, 1.0) / a
        i, u = _cell(np.log(self._active), np.log(a))
        j, v = _cell(np.log(self._per_expert), np.log(r))
        i1, j1 = np.minimum(i + 1, len(self._active) - 1), np.minimum(j + 1, len(self._per_expert) - 1)
        z = self._log_us
        log_us = (1 - u) * ((1 - v) * z[i, j] + v * z[i, j1]) + u * ((1 - v) * z[i1, j] + v * z[i1, j1])
        beyond = np.maximum(a / self._active[-1], 1.0) * np.maximum(r / self._per_expert[-1], 1.0)
        return np.where(busy, np.exp(log_us) * beyond, 0.0)


def _cell(knots: Float, x: Float) -> tuple[NDArray[np.int64], Float]:
    """Index of the knot at or below x and the share of the way to the next, clipped to the grid."""
    place = np.interp(x, knots, np.arange(len(knots)))
    index = place.astype(np.int64)
    return index, place - index
