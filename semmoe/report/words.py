"""The summary of a comparison in sentences, for the terminal and for the page."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ..compare import PREDICTED, Comparison

NAMES = {
    "layer": "Layer",
    "attention": "Attention",
    "step": "Step",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "End-to-end",
}


def summary_lines(comparison: Comparison) -> list[str]:
    """One sentence a line: what joined, equality of traffic, planned LAR, errors beside spreads, order of policies."""
    summary, table = comparison.summary, comparison.table
    lines = [*_sides(table), *_equality(summary, table)]
    if gap := summary.get("lar_gap_points"):
        lines.append(
            f"Planned LAR against {gap['against']}: {gap['median']:.1f} points off in the median, {gap['max']:.1f} at most."
        )
    lines += [_error(name, summary[name]) for name in PREDICTED if name in summary]
    lines += _waiting(summary)
    within, across = summary["order"], summary["order_across_flows"]
    lines += [_order("Order of policies within a flow", within)] if _pairs(within) else []
    lines += [_order("Order between flows", across)] if _pairs(across) else []
    if summary["other_calibration"]:
        lines.append(f"In {summary['other_calibration']} configurations the cluster file changed between prediction and "
                     "measurement; run both again to compare like with like.")  # fmt: skip
    return lines


def _waiting(summary: dict[str, Any]) -> list[str]:
    """What part of a layer the mean rank waits, and for what."""
    whats = {"wait_share": "for others in exchanges", "core_wait_share": "for a core that another rank computes on"}
    told = []
    for name, what in whats.items():
        if (share := summary.get(name)) is not None:
            predicted = "" if math.isnan(share["predicted"]) else f" (predicted {100 * share['predicted']:.0f})"
            told.append(f"{100 * share['measured']:.0f} %{predicted} {what}")
    return [f"Waiting of the mean rank, of its layer's time: {', '.join(told)}."] if told else []


def shared_line(comparison: Comparison) -> str:
    """What all configurations have in common."""
    names = ("model", "cluster", "ep_size", "workload", "batch_tokens", "rate_rps", "dtype", "scope", "seed")
    table = comparison.table
    same = [n for n in names if table[n].nunique(dropna=False) == 1 and not pd.isna(table[n].iloc[0])]
    return ", ".join(
        f"{n} {table[n].iloc[0]:g}" if isinstance(table[n].iloc[0], float) else f"{n} {table[n].iloc[0]}" for n in same
    )


def _sides(table: pd.DataFrame) -> list[str]:
    counts = table.sides.value_counts()
    if counts.get("both", 0) == len(table):
        return []
    told = ", ".join(f"{counts[side]} {side}" for side in ("both", "simulated only", "measured only") if side in counts)
    many = "configurations" if len(table) > 1 else "configuration"
    return [f"{len(table)} {many}: {told.replace('both', 'simulated and measured')}."]


def _equality(summary: dict[str, Any], table: pd.DataFrame) -> list[str]:
    equal, both = summary["replay_equal"], summary["both"]
    if not both:
        return []
    text = f"Traffic replayed in simulation equals what was counted, to the last row, in {equal['yes']} of {both} cases"
    if equal["other_steps"]:
        text += (
            f"; {equal['other_steps']} formed other batches (semmoe simulate replay=RUN re-executes the measured ones)"
        )
    if equal["no"]:
        named = [f"#{i} {told[3:]}" for i, told in enumerate(table.replay_equal, 1) if told.startswith("no")]
        text += f"; {equal['no']} DIFFER: {', '.join(named)}"
    return [text + "."]


def _error(name: str, s: dict[str, Any]) -> str:
    text = f"{NAMES[name]} time: median absolute error {s['median_error_pct']:.1f} %, p90 {s['p90_error_pct']:.1f} %"
    if math.isnan(s["median_spread_pct"]):
        return f"{text} over {s['count']} configurations; one repeat each, so their spread is unknown."
    text += f"; repeats of one configuration spread by {s['median_spread_pct']:.1f} %."
    return f"{text} {s['within']} of {s['count']} are within 20 % or twice their own spread."


def _pairs(counts: dict[str, Any]) -> int:
    return int(counts["same"] + counts["opposite"] + counts["undecided"])


def _order(what: str, c: dict[str, Any]) -> str:
    text = f"{what}: {c['same']} pairs agree, {c['opposite']} disagree, {c['undecided']} undecided (measured intervals overlap)"
    return f"{text}; Kendall tau over the means {c['kendall_tau']:+.2f}."
