"""Rank order of policies: does the simulator put them in the order that measurement does?

    python -m semmoe.rank_order RUN [RUN ...] --out results/rank_order.md

Within one model, flow, dispatcher and batch size, every pair of policies. A sweep runs every policy once before any runs
again, so repeat i of two policies ran close in time: a pair is decided where the interval of the paired differences of log
layer time excludes 0 (Student's t, 95 % over all pairs together: each at 1 - 5 % / pairs). Beside it stands which pairs have
separate intervals of the median layer time over repeats. That interval is of the estimate, from order statistics: of n
repeats the median lies between the k-th smallest and the k-th largest with probability 1 - 2 P(Binomial(n, 1/2) < k),
whatever their distribution; k is the largest that leaves 95 % (16 repeats: k = 4, 97.9 %; fewer than 6: none). A machine that
drifts widens it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .compare import Comparison, compare
from .errors import UserError
from .page_command import write_page
from .verdict import Gain, Pair, gain, pairs

FEWEST = 6  # policies in one setting
LEVEL = 0.95  # with which all decided pairs are truly apart
SAID = {"same": "agrees", "opposite": "DISAGREES", "undecided": "undecided"}


@dataclass(frozen=True)
class Judged:
    """A pair whose `apart` and `measured` come from paired differences. gain: a's over b, percent of b's layer time;
    separate: sign of a's median less b's where the intervals of their medians do not overlap, else 0."""

    pair: Pair
    gain: Gain
    separate: int

    @property
    def tied(self) -> bool:
        """Measured apart, equal in simulation."""
        return self.pair.apart and self.pair.verdict == "undecided"


def rank_order(comparison: Comparison) -> tuple[pd.DataFrame, list[Judged]]:
    """(lines of the measured and simulated configurations, their pairs); UserError for fewer than six."""
    both = comparison.table[(comparison.table.sides == "both") & (comparison.table.workload == "batches")]
    if len(both) < FEWEST:
        raise UserError(
            f"{len(both)} configurations of fixed batches are both simulated and measured; a rank order needs {FEWEST} "
            "(semmoe simulate and semmoe measure experiment=rank_order)"
        )
    groups: dict[Any, pd.DataFrame] = dict(list(comparison.rows.groupby("key")))
    found = pairs(both, groups, across_flows=False)
    level = 1 - (1 - LEVEL) / max(len(found), 1)
    return both, [_judged(pair, groups, level) for pair in found]


def _judged(pair: Pair, groups: Mapping[Any, pd.DataFrame], level: float) -> Judged:
    a, b = (rows[(rows.backend == "harness") & rows.layer_ms.notna()] for rows in (groups[pair.a], groups[pair.b]))
    found = gain(a, b, "layer_ms", level)
    if len(set(a.repeat) & set(b.repeat)) < 2:  # nothing is paired
        found = Gain(found.pct)
    sign = 0 if found.pct == 0 else -1 if found.pct > 0 else 1
    (a_low, a_high), (b_low, b_high) = (median_interval(rows.layer_ms) for rows in (a, b))
    separate = int(a_low > b_high) - int(b_low > a_high)
    return Judged(replace(pair, measured=sign, apart=found.decided), found, separate)


def median_interval(repeats: Iterable[float], level: float = LEVEL) -> tuple[float, float]:
    """Interval of the median by order statistics; NaN where even the extremes do not reach `level`.

    Worked example, 6 values: the median lies outside their range with probability 2 / 2^6 = 3.1 %."""
    from scipy.special import bdtr

    ordered = np.sort(np.asarray(list(repeats), dtype=np.float64))
    outside = [k for k in range(len(ordered) // 2) if 2 * bdtr(k, len(ordered), 0.5) <= 1 - level]
    if not outside:
        return math.nan, math.nan
    return float(ordered[outside[-1]]), float(ordered[-1 - outside[-1]])


def summary(found: Sequence[Judged]) -> str:
    """Counts in two sentences, and the bar: no pair that the measurement decides is in the opposite order."""
    counts = {v: sum(one.pair.verdict == v for one in found) for v in SAID}
    decided, tied = counts["same"] + counts["opposite"], sum(one.tied for one in found)
    text = (
        f"{len(found)} pairs: {decided} are decided by paired differences, of which {counts['same']} agree and "
        f"{counts['opposite']} disagree in order; {counts['undecided'] - tied} are not decided"
    )
    text = f"{text}; {tied} measured apart are equal in simulation." if tied else f"{text}."
    orders = [one.separate * one.pair.predicted for one in found if one.separate]
    return (
        f"{text} The intervals of the median overlap in {len(found) - len(orders)}; of the other {len(orders)}, "
        f"{sum(order > 0 for order in orders)} agree and {sum(order < 0 for order in orders)} disagree in order."
    )


def document(comparison: Comparison, command: str) -> str:
    """The Markdown page: policies by measured latency, and every pair."""
    both, found = rank_order(comparison)
    real = comparison.rows[comparison.rows.backend == "harness"]
    repeats = {key: rows.layer_ms.dropna() for key, rows in real.groupby("key") if key in set(both.key)}
    both = both.assign(median_ms=[repeats[key].median() for key in both.key]).sort_values("median_ms")
    number = {key: i for i, key in enumerate(both.key, 1)}
    predicted_ms = dict(zip(both.key, both.layer_ms_predicted, strict=True))
    lines = ["# Rank order of policies", "", f"Made by `{command}`.", "", summary(found), ""]
    lines += [
        "| # | configuration | LAR measured | imbalance | measured ms | interval ms | repeats ms | simulated ms |",
        "|" + " --- |" * 8,
    ]
    for _, x in both.iterrows():
        low, high = median_interval(repeats[x.key])
        interval = "-" if math.isnan(low) else f"{low:.3f} to {high:.3f}"
        lines.append(
            f"| {number[x.key]} | {x.configuration} | {x.lar_measured:.3f} | {x.imbalance_step:.2f} | {x.median_ms:.3f} | "
            f"{interval} | {repeats[x.key].min():.3f} to {repeats[x.key].max():.3f} | {x.layer_ms_predicted:.3f} |"
        )
    lines += [
        "",
        "Measured: median over repeats, the 95 % interval in which it lies, and beside it the range of the repeats.",
        "",
        "First over second: percent of the second's layer time, positive is faster; measured with the interval of the paired "
        "differences over repeats.",
        "",
        "| pair | measured gain % | interval % | simulated gain % | order | separate intervals |",
        "|" + " --- |" * 6,
    ]
    for one in sorted(found, key=lambda one: (number[one.pair.a], number[one.pair.b])):
        pair, gained = one.pair, one.gain
        simulated = 100 * (1 - predicted_ms[pair.a] / predicted_ms[pair.b])
        spans = (
            f"{max(gained.low_pct, -999.0):+.1f} to {gained.high_pct:+.1f}" if gained.known else "-"
        )  # two repeats: wide
        said = "equal in simulation" if one.tied else SAID[pair.verdict]
        lines.append(
            f"| {number[pair.a]}, {number[pair.b]} | {gained.pct:+.1f} | {spans} | {simulated:+.1f} | {said} | "
            f"{_separate(one)} |"
        )
    return "\n".join(lines) + "\n"


def _separate(one: Judged) -> str:
    agrees = one.separate * one.pair.predicted
    return (
        "overlap" if not one.separate else "agrees" if agrees > 0 else "DISAGREES" if agrees else "equal in simulation"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the counts."""
    return write_page("rank_order", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    return document(comparison, command), [summary(rank_order(comparison)[1])]


if __name__ == "__main__":
    sys.exit(main())
