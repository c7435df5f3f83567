"""How well a cluster file describes the samples that it was made from, as a table; and whether the machine was quiet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fit import BLOCK_WORK, Samples, attention_terms, balanced_and_skewed, block_term, points_of, steady
from .skew import held_out_errors

BUSY_LOAD = 0.3  # load average a core, before the calibration adds its own, above which its figures are doubtful
BUSY_SPREAD = 0.6  # (p90 - p10) / median of repeated samples of local work, in the median over operations

BETWEEN_POOLS = "%, slowest pool of ranks against the fastest"


class Residual(NamedTuple):
    """One line: what, over how many points, errors or values in `unit`."""

    operation: str
    points: int
    median: float
    p90: float
    unit: str


def residuals(samples: Samples, cluster: dict[str, Any], ranks: int) -> list[Residual]:
    """Repeatability of every collective, within a pool of ranks and between them, errors of the linear fits and of skew at
    held-out shares, rules of sharing."""
    lines: list[Residual] = []
    halves: dict[str, list[float]] = {}
    pools: dict[str, list[float]] = {}
    for (case, members), us in samples.collectives.items():
        if members == ranks and not case.skew and len(us) > 1:
            halves.setdefault(case.op, []).append(100 * abs(steady(us[::2]) / steady(us[1::2]) - 1))
            pools.setdefault(case.op, []).append(pool_spread_pct(us, samples.pools))
    lines += [_line(op, errors, "%, one half of the samples against the other") for op, errors in halves.items()]
    if samples.pools > 1:
        lines += [_line(f"{op}, pools", spreads, BETWEEN_POOLS) for op, spreads in pools.items()]
    for op, share in held_out_errors(balanced_and_skewed(samples, ranks), ranks, cluster.get("skew", {})).items():
        lines.append(_line(f"{op}, skewed", 100 * share, "%, skews that the fit has not seen"))
    for what in cluster["host_us"]:
        if what in cluster["per_row_ns"]:
            handled, taken_us = points_of(samples, what)
            fit_us = cluster["host_us"][what] + cluster["per_row_ns"][what] * handled / 1e3
            lines.append(_line(what, 100 * np.abs(fit_us / taken_us - 1), "%, fixed + rows against measured"))
    named = {name: attention_terms(name) for name in samples.attention}
    named |= {name: [name, *(block_term(name, work) for work in BLOCK_WORK)] for name in samples.blocks}
    for name, points in (samples.attention | samples.blocks).items():
        fixed, *by_work = named[name]
        terms = [cluster["host_us"][fixed], *(cluster["per_row_ns"][term] / 1e3 for term in by_work)]
        errors = [abs(float(np.dot(terms, (1, *work))) / us - 1) for work, us in points.items()]
        lines.append(_line(name, 100 * np.array(errors), "%, linear in its work against measured"))
    shared = -(-ranks // max(int(cluster["cores"]), 1))  # ranks on the fullest core
    rule = [100 * abs(cpu * shared / wall - 1) for cpu, wall in samples.experts.values()]
    lines.append(
        _line("experts, all at once", rule, "%, CPU time times the ranks of a core against the slowest rank's clock")
    )
    return lines


def pool_spread_pct(us: Sequence[float], pools: int) -> float:
    """(slowest - fastest pool of ranks) / mean of the pools, in per cent; samples lie pool by pool.

    Worked example, two pools of two samples: [90, 110, 100, 140] -> 100 and 120: 18.2."""
    means = [steady(part) for part in np.asarray(us).reshape(pools, -1).tolist()]
    return 100 * (max(means) - min(means)) / (sum(means) / pools)


def _line(operation: str, values: Iterable[float] | NDArray[np.float64], unit: str) -> Residual:
    array = np.asarray(list(values), dtype=np.float64)
    return Residual(operation, len(array), float(np.median(array)), float(np.quantile(array, 0.9)), unit)


def table(lines: Sequence[Residual]) -> str:
    """The residuals for a terminal."""
    width = max(len(line.operation) for line in lines)
    head = f"{'operation':{width}s}  points  median    p90  unit"
    rows = [f"{x.operation:{width}s}  {x.points:6d}  {x.median:6.1f} {x.p90:6.1f}  {x.unit}" for x in lines]
    return "\n".join([head, *rows])


def spread(samples: Samples) -> float:
    """(p90 - p10) / median of the samples of an operation of local work, in the median over all of them. Exchanges have no
    say: where ranks share cores, their times differ by half on a quiet machine too."""
    every = [np.array(us_GS).mean(axis=0) for us_GS in samples.raw.values()]
    each = [(np.quantile(us, 0.9) - np.quantile(us, 0.1)) / np.median(us) for us in every if len(us) > 1]
    return float(np.median(each)) if each else 0.0


def busy_warning(load_1min: float, cores: int, spread: float) -> str | None:
    """What to tell a user whose machine did other work during the calibration; None where it was quiet."""
    reasons = []
    if load_1min > BUSY_LOAD * cores:
        reasons.append(f"load average {load_1min:.1f} on {cores} cores before it began")
    if spread > BUSY_SPREAD:
        reasons.append(f"samples of one operation spread by {100 * spread:.0f} %")
    if not reasons:
        return None
    return (
        f"times of this machine are doubtful ({'; '.join(reasons)}): predictions of another hour may be off. End other "
        "work, wait a minute and run `semmoe calibrate` again (measure.calibration=thorough takes more samples); measure "
        "soon after it"
    )


def load_1min() -> float:
    return os.getloadavg()[0]
