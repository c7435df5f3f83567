"""Rank order of policies: does the simulator put them in the order that measurement does?

    python -m semmoe.rank_order RUN [RUN ...] --out results/rank_order.md

Within one model, flow, dispatcher and batch size, every pair of policies. A sweep runs every policy once before any runs
again, so repeat i of two policies ran close in time: a pair is decided where the interval of the paired differences of log
layer time excludes 0 (Student's t, 95 % over all pairs together: each at 1 - 5 % / pairs). Beside it stands how many pairs
have separate intervals (all repeats, widened by each one's bootstrap interval), which a drifting machine widens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    separate: whether its measured intervals do not overlap either."""

    pair: Pair
    gain: Gain
    separate: bool

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
    return Judged(replace(pair, measured=sign, apart=found.decided), found, pair.apart)


def summary(found: Sequence[Judged]) -> str:
    """One sentence of counts, and the bar: no pair that the measurement decides is in the opposite order."""
    counts = {v: sum(one.pair.verdict == v for one in found) for v in SAID}
    decided, tied = counts["same"] + counts["opposite"], sum(one.tied for one in found)
    text = (
        f"{len(found)} pairs: {decided} are decided by paired differences, of which {counts['same']} agree and "
        f"{counts['opposite']} disagree in order; {counts['undecided'] - tied} are not decided; "
        f"{sum(not one.separate for one in found)} have overlapping measured intervals"
    )
    return f"{text}; {tied} measured apart are equal in simulation." if tied else f"{text}."


def document(comparison: Comparison, command: str) -> str:
    """The Markdown page: policies by measured latency, and every pair."""
    both, found = rank_order(comparison)
    number = {key: i for i, key in enumerate(both.sort_values("layer_ms_measured").key, 1)}
    predicted_ms = dict(zip(both.key, both.layer_ms_predicted, strict=True))
    lines = ["# Rank order of policies", "", f"Made by `{command}`.", "", summary(found), ""]
    lines += [
        "| # | configuration | LAR measured | imbalance | measured ms | interval ms | simulated ms |",
        "|" + " --- |" * 7,
    ]
    for _, x in both.sort_values("layer_ms_measured").iterrows():
        lines.append(
            f"| {number[x.key]} | {x.configuration} | {x.lar_measured:.3f} | {x.imbalance_step:.2f} | "
            f"{x.layer_ms_measured:.3f} | {x.layer_ms_low:.3f} to {x.layer_ms_high:.3f} | {x.layer_ms_predicted:.3f} |"
        )
    lines += [
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
            f"{'do not overlap' if one.separate else 'overlap'} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the counts."""
    return write_page("rank_order", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    return document(comparison, command), [summary(rank_order(comparison)[1])]


if __name__ == "__main__":
    sys.exit(main())
