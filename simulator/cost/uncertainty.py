"""How far predicted times may be off: random factors on every phase, common to two configurations in part.

A predicted time is sum_p phase_p; what it may really be is

    (sum_p phase_p * exp(sigma_p * e_p) + jitter) * exp(bias + spread * e_0),   e = sqrt(r) common + sqrt(1 - r) own,

e standard normal. What is common (the same curve, the same kernel, the same machine) cancels in a gain, what is own does
not. Measured curves and tables: sigma_p from the held-out errors of results/validate.md (p90 / 1.645). Presets with
assumed parts: ASSUMED times as much. CPU machines: bias, spread and r of what was measured there (`Residuals.of`), whose
own single operations are calibrated, but whose cores are shared and noisy: most of an error is the setting's (ranks,
tokens), so two configurations of one setting have it in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semmoe.specs import ClusterSpec

Float = NDArray[np.float64]
# nccl.pooled; dispatch and combine deepep.normal, the wider one; moe.law
SIGMA = {"srs": 0.074, "dispatch": 0.086, "combine": 0.086, "sag": 0.074, "experts": 0.103}
SIGMA_ELSE = 0.3  # gate, permute, plan, shared experts: no held-out data
JITTER_MS = 0.003  # of each exchange: half of the 5 us by which NCCL versions differ below 1 MiB
ASSUMED = 2.5
COMMON = 0.7  # r: share of an error's variance that two configurations of one machine have in common
LEVEL = 0.8


@dataclass(frozen=True)
class Residuals:
    """Of log(measured / predicted) over whole configurations: its mean and standard deviation, and the share of its
    variance that two configurations of one setting have in common."""

    bias: float = 0.0
    spread: float = 0.0
    common: float = COMMON

    @classmethod
    def of(cls, logs: Sequence[float], differences: Sequence[float] = ()) -> Residuals:
        """From earlier configurations, and differences of two of one setting; widened as Student's t is, for few of them.

        The variance of a difference is 2 (1 - common) spread^2, so that a gain's interval is as wide as differences were.
        """
        values = np.asarray(logs, dtype=np.float64)
        if len(values) < 3:
            return CPU
        spread = float(values.std(ddof=1) * _wider(len(values)))
        if len(differences) < 3 or spread == 0:
            return cls(float(values.mean()), spread, CPU.common)
        apart = float(np.mean(np.square(differences))) * _wider(len(differences)) ** 2
        return cls(float(values.mean()), spread, float(np.clip(1 - apart / (2 * spread**2), 0.0, 1.0)))


def _wider(count: int) -> float:
    return float(np.sqrt(1 + 1 / count) * (1 + 1 / (2 * (count - 1))))


CPU = Residuals(0.07, 0.11, 0.80)  # the 65 configurations of results/coverage.md, 2 and 4 ranks on 2 cores


def possible_ms(
    phases: Sequence[Mapping[str, float]],
    cluster: ClusterSpec,
    draws: int = 4000,
    seed: int = 0,
    residuals: Residuals | None = None,
) -> Float:
    """times [draws, configurations] that these predicted phases (milliseconds by name) may really take."""
    rng = np.random.default_rng(seed)
    shape = (draws, len(phases))

    if residuals is None:
        residuals = CPU if cluster.cores else Residuals()
    shared = residuals.common

    def error() -> Float:
        return np.sqrt(shared) * rng.standard_normal((draws, 1)) + np.sqrt(1 - shared) * rng.standard_normal(shape)

    wide = ASSUMED if not cluster.cores and "assumed" in _words(cluster) else 1.0
    total = np.zeros(shape)
    for name in sorted({name for table in phases for name in table}):
        value = np.array([table.get(name, 0.0) for table in phases])
        total += value * np.exp(wide * SIGMA.get(name, SIGMA_ELSE) * error()) if not cluster.cores else value
        if name in SIGMA and name != "experts" and not cluster.cores:
            total += np.where(value > 0, JITTER_MS * error(), 0.0)
    return np.maximum(total, 1e-9) * np.exp(residuals.bias + residuals.spread * error())


def interval(values: Float, level: float = LEVEL) -> tuple[float, float]:
    """The central interval that holds `level` of the values."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _words(cluster: ClusterSpec) -> str:
    said = cluster.provenance
    return f"{said.get('link', '')} {said.get('experts', '')}".lower()
