"""Rank order of policies: does the simulator put them in the order that measurement does?

    python -m semmoe.rank_order RUN [RUN ...] --out results/rank_order.md

Within one model, flow, dispatcher and batch size, every pair of policies: whether the measured intervals of layer latency
(all repeats, widened by each one's bootstrap interval) overlap, and if they do not, whether the simulated order agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from .compare import Comparison, compare
from .errors import UserError
from .page_command import write_page
from .verdict import Pair, pairs

FEWEST = 6  # policies in one setting
SAID = {"same": "agrees", "opposite": "DISAGREES", "undecided": "intervals overlap"}


def rank_order(comparison: Comparison) -> tuple[pd.DataFrame, list[Pair]]:
    """(lines of the measured and simulated configurations, their pairs); UserError for fewer than six."""
    both = comparison.table[(comparison.table.sides == "both") & (comparison.table.workload == "batches")]
    if len(both) < FEWEST:
        raise UserError(
            f"{len(both)} configurations of fixed batches are both simulated and measured; a rank order needs {FEWEST} "
            "(semmoe simulate and semmoe measure experiment=rank_order)"
        )
    groups: dict[Any, pd.DataFrame] = dict(list(comparison.rows.groupby("key")))
    return both, pairs(both, groups, across_flows=False)


def summary(found: Sequence[Pair]) -> str:
    """One sentence of counts, and the bar: no pair that the measurement decides is in the opposite order."""
    counts = {v: sum(pair.verdict == v for pair in found) for v in SAID}
    decided = counts["same"] + counts["opposite"]
    tied = sum(pair.apart and pair.verdict == "undecided" for pair in found)
    text = (
        f"{len(found)} pairs: {counts['undecided'] - tied} have overlapping measured intervals, {decided} are decided, of "
        f"which {counts['same']} agree and {counts['opposite']} disagree in order"
    )
    return f"{text}; {tied} measured apart are equal in simulation." if tied else f"{text}."


def document(comparison: Comparison, command: str) -> str:
    """The Markdown page: policies by measured latency, and every pair."""
    both, found = rank_order(comparison)
    number = {key: i for i, key in enumerate(both.sort_values("layer_ms_measured").key, 1)}
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
    lines += ["", "| pair | measured faster | simulated faster | order |", "| --- | --- | --- | --- |"]
    for pair in sorted(found, key=lambda p: (number[p.a], number[p.b])):
        faster = [_faster(number[pair.a], number[pair.b], sign) for sign in (pair.measured, pair.predicted)]
        equal = pair.apart and pair.verdict == "undecided"
        said = "equal in simulation" if equal else SAID[pair.verdict]
        lines.append(f"| {number[pair.a]}, {number[pair.b]} | {faster[0]} | {faster[1]} | {said} |")
    return "\n".join(lines) + "\n"


def _faster(a: int, b: int, sign: int) -> str:
    return "-" if sign == 0 else f"{a if sign < 0 else b}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the counts."""
    return write_page("rank_order", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    return document(comparison, command), [summary(rank_order(comparison)[1])]


if __name__ == "__main__":
    sys.exit(main())
