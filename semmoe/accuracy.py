"""Accuracy: predictions of a fresh calibration on configurations that it has not seen, held against measurements.

    python -m semmoe.accuracy RUN [RUN ...] --out results/accuracy.md --command "make accuracy"

Bars, in per cent of the measured mean: layer latency median 10 and p90 20, served TPOT the same; each is twice the spread
of repeats where that is larger (median spread for the median, p90 spread for the p90). Replayed step plans give the
measured Traffic to the last row; free-running LAR is within 1 point.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .compare import Comparison, compare
from .page_command import write_page

MEDIAN_PCT, P90_PCT, LAR_POINTS = 10.0, 20.0, 1.0
PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag", "other", "layer")


@dataclass(frozen=True)
class Bar:
    """One line of the verdict: a figure, what it may be at most, and over how many configurations."""

    what: str
    figure: float
    allowed: float
    count: int
    unit: str = "%"

    @property
    def met(self) -> bool:
        return self.count > 0 and self.figure <= self.allowed


def bars(comparison: Comparison) -> list[Bar]:
    """All bars of a comparison of fixed batches, served runs and their replays, for each number of ranks."""
    table = comparison.table
    found = []
    for ranks, lines in table[table.sides == "both"].groupby("ep_size"):
        found += _latency(f"{ranks} ranks, layer", lines[lines.workload == "batches"], "layer")
        found += _latency(f"{ranks} ranks, served TPOT", lines[lines.workload == "serve"], "tpot")
        differ = lines.replay_equal.str.startswith("no") | (lines.replay_equal == "other steps")
        found.append(
            Bar(f"{ranks} ranks, Traffic that differs", float(differ.sum()), 0.0, len(lines), "configurations")
        )
        gaps = free_running_lar_points(comparison.rows[comparison.rows.ep_size == ranks])
        found.append(
            Bar(f"{ranks} ranks, free-running LAR", max(gaps, default=math.nan), LAR_POINTS, len(gaps), "points")
        )
    return found


def _latency(what: str, lines: pd.DataFrame, name: str) -> list[Bar]:
    known = lines.dropna(subset=[f"{name}_error_pct"])
    errors, spread = known[f"{name}_error_pct"].abs(), known[f"{name}_spread_pct"].dropna()
    made = []
    for label, q, bar in (("median", 0.5, MEDIAN_PCT), ("p90", 0.9, P90_PCT)):
        allowed = max(bar, 2 * float(spread.quantile(q))) if len(spread) else bar
        made.append(Bar(f"{what} error, {label}", float(errors.quantile(q)), allowed, len(known)))
    return made


def free_running_lar_points(rows: pd.DataFrame) -> list[float]:
    """|LAR simulated - measured| in points of every served configuration, each backend having formed its own batches."""
    served = rows[rows.workload == "serve"]
    free = served[(served.backend == "simulator") & served.steps_file.isna()].groupby("config_id").lar_replayed.mean()
    real = served[served.backend == "harness"].groupby("config_id").lar_measured.mean()
    both = free.index.intersection(real.index)
    return [100 * abs(float(free[i]) - float(real[i])) for i in both]


def document(comparison: Comparison, command: str) -> str:
    """The Markdown page: bars, every configuration, phases, and what it was measured on."""
    found = bars(comparison)
    lines = ["# Accuracy on held-out configurations", "", f"Made by `{command}`.", ""]
    lines += _environment(comparison.rows)
    lines += ["", "| figure | value | at most | unit | configurations | met |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {b.what} | {b.figure:.1f} | {b.allowed:.1f} | {b.unit} | {b.count} | {'yes' if b.met else 'NO'} |"
        for b in found
    ]
    lines += ["", "At most: 10 % in the median and 20 % at p90, or twice the repeats' spread where that is larger.", ""]
    both = comparison.table[comparison.table.sides == "both"]
    lines += _configurations("Layer latency of fixed batches", both[both.workload == "batches"], "layer")
    lines += _configurations("TPOT of served runs", both[both.workload == "serve"], "tpot")
    return "\n".join([*lines, *_phases(comparison.rows)]) + "\n"


def _environment(rows: pd.DataFrame) -> list[str]:
    made = [json.loads(text) for text in rows.environment.dropna()]
    if not made:
        return []
    loads = [float(e["load_1min"]) for e in made if "load_1min" in e]
    names = ", ".join(f"{key} {made[0][key]}" for key in ("cpu", "cores", "torch", "python") if key in made[0])
    loaded = f"; load average while measuring {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    commits = ", ".join(sorted(set(rows.commit.dropna())))
    return [f"Machine: {names}{loaded}. Commit {commits}. CPU processes: no link speed may be derived from them."]


def _configurations(title: str, lines: pd.DataFrame, name: str) -> list[str]:
    out = [f"## {title}", "", "| configuration | predicted ms | measured ms | error % | spread of repeats % |"]
    out += ["| --- | --- | --- | --- | --- |"]
    for _, line in lines.iterrows():
        predicted, real = line[f"{name}_ms_predicted"], line[f"{name}_ms_measured"]
        error, spread = line[f"{name}_error_pct"], line[f"{name}_spread_pct"]
        out.append(f"| {line.configuration} | {predicted:.2f} | {real:.2f} | {error:+.1f} | {spread:.1f} |")
    return [*out, ""]


def _phases(rows: pd.DataFrame) -> list[str]:
    """Mean milliseconds of every phase of a layer, predicted and measured (slowest rank of each phase, so measured
    phases add up to more than the layer: a rank that waits in one was not the slowest of the one before)."""
    batches = rows[rows.workload == "batches"]
    out = [
        "## Phases of fixed batches",
        "",
        "Measured: slowest rank of each phase, so they add up to more than the layer.",
        "",
    ]
    out += ["| ranks | flow | " + " | ".join(PHASES) + " |", "| --- | --- |" + " --- |" * len(PHASES)]
    for (ranks, flow), group in batches.groupby(["ep_size", "flow"]):
        cells = []
        for phase in PHASES:
            mean = group.groupby("backend")[f"{phase}_ms"].mean()
            told = [mean.get(side, math.nan) for side in ("simulator", "harness")]
            cells.append(
                ""
                if all(math.isnan(x) for x in told)
                else " / ".join("-" if math.isnan(x) else f"{x:.2f}" for x in told)
            )
        out.append(f"| {ranks} | {flow} | " + " | ".join(cells) + " |")
    return [*out, "", "Each cell: predicted / measured, mean over configurations."]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the bars. Exit status 0 whether they are met or not: a miss is a result."""
    return write_page("accuracy", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    said = [
        f"{bar.what:42s} {bar.figure:6.1f} {bar.unit} (at most {bar.allowed:.1f}): {'met' if bar.met else 'MISSED'}"
        for bar in bars(comparison)
    ]
    return document(comparison, command), said


if __name__ == "__main__":
    sys.exit(main())
