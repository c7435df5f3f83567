"""Accuracy: predictions of a fresh calibration on configurations that it has not seen, held against measurements.

    python -m semmoe.accuracy RUN [RUN ...] --out results/accuracy.md --command "make accuracy"

Bars, in per cent of the measured mean: layer latency median 10 and p90 20, served TPOT the same; each is twice the spread
of repeats (their mean difference) where that is larger: median spread for the median, p90 spread for the p90. Replayed step
plans give the measured Traffic to the last row; free-running LAR is within 1 point.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from .axes import POLICIES
from .compare import Comparison, compare
from .page_command import write_page
from .repeats import mean_difference
from .results import WAITS

MEDIAN_PCT, P90_PCT, LAR_POINTS = 10.0, 20.0, 1.0
EXCHANGES = ("srs", "dispatch", "combine", "sag")
PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag", "other")
SHOWN = (*PHASES, "exchange", "layer", *WAITS)
JUDGED = (*POLICIES, "ep_size", "scope")  # the longest run of each is judged for its LAR
OFF = 0.05  # of the layer
ABOUT_BARS = (
    "At most: 10 % in the median, 20 % at p90, or twice the repeats' spread (mean difference) where that is larger"
)
ABOUT_LAR = (
    "Each backend forms its own batches. A request's home depends on the queues that it finds, so LAR depends on when steps",
    "end: simulated with all steps 8 % longer, LAR of 60 requests moves by up to 1.2 points either way (4 seeds), of 240 by up",
    "to 0.7. So the longest run of the same policies and scope is judged; the others stand beside it.",
)
ABOUT_PHASES = (
    "Each cell: predicted / measured ms (error in %), mean over configurations. Phases lie on the critical path of a layer and",
    "add up to it, waiting apart: measured on the clock that the ranks share, from the last entry into one exchange to",
    "the last entry into the next, on the core of that rank (harness/critical_path.py). exchange: srs + dispatch + combine +",
    "sag. wait: mean over ranks, in an exchange before the last rank has entered it. core_wait: likewise, while another rank",
    "computes on the same core. Both are time of ranks off the path, no part of the sum; predicted from the work of each rank",
    "alone (simulator/cost/host.py), so without the scheduler's own delays. other: until the first rank of the path has left",
    "the barrier before the layer.",
)
KEY_LENGTH = 5  # op, rows, skew, pattern, ranks: what comes before the samples
POOLS = ", pools"  # of a residual that compares pools of ranks (harness/calibration/residuals.py)
ABOUT_CALIBRATIONS = (
    "An exchange takes another time in every pool of ranks that is started. Difference between one half of the samples and",
    "the other, and between the slowest pool of ranks and the fastest, in the median over sizes. Predictions are of the mean.",
)


@dataclass(frozen=True)
class Bar:
    """One line of the verdict: a figure, what it may be at most, and over how many configurations."""

    what: str
    figure: float
    allowed: float
    count: int
    unit: str = "%"
    spread: float = math.nan  # of repeats, in the same unit

    @property
    def met(self) -> bool:
        return self.count > 0 and self.figure <= self.allowed


def bars(comparison: Comparison) -> list[Bar]:
    """All bars of a comparison of fixed batches, served runs and their replays, for each number of ranks."""
    table = comparison.table
    found = []
    for ranks, lines in table[table.sides == "both"].groupby("ep_size"):
        found += latency(f"{ranks} ranks, layer", lines[lines.workload == "batches"], "layer")
        found += latency(f"{ranks} ranks, served TPOT", lines[lines.workload == "serve"], "tpot")
        differ = lines.replay_equal.str.startswith("no") | (lines.replay_equal == "other steps")
        found.append(
            Bar(f"{ranks} ranks, Traffic that differs", float(differ.sum()), 0.0, len(lines), "configurations")
        )
        lar = free_running_lar(comparison.rows[comparison.rows.ep_size == ranks])
        lar = lar[lar.judged]
        worst, spread = float(lar.gap_points.abs().max()), float(lar.spread_points.max())
        found.append(Bar(f"{ranks} ranks, free-running LAR", worst, LAR_POINTS, len(lar), "points", spread))
    return found


def latency(what: str, lines: pd.DataFrame, name: str) -> list[Bar]:
    """Bars of the median and of p90 of the error of `name`_ms over these lines of a comparison's table."""
    known = lines.dropna(subset=[f"{name}_error_pct"])
    errors, spread = known[f"{name}_error_pct"].abs(), known[f"{name}_spread_pct"].dropna()
    made = []
    for label, q, bar in (("median", 0.5, MEDIAN_PCT), ("p90", 0.9, P90_PCT)):
        width = float(spread.quantile(q)) if len(spread) else math.nan
        allowed = max(bar, 2 * width) if len(spread) else bar
        made.append(Bar(f"{what} error, {label}", float(errors.quantile(q)), allowed, len(known), spread=width))
    return made


def free_running_lar(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per served configuration, each backend and repeat having formed its own batches: LAR simulated and measured
    (mean), their gap and the spread of repeats in points, and whether it is judged: the longest run of its policies is.

    Homes depend on when steps end, and so LAR does: the fewer requests, the more by chance."""
    served = rows[rows.workload == "serve"]
    free = served[(served.backend == "simulator") & served.steps_file.isna()]
    real = served[served.backend == "harness"].groupby("config_id")
    table = free.groupby("config_id").agg({**dict.fromkeys(JUDGED, "first"), "tokens": "mean", "lar_replayed": "mean"})
    lar = real.lar_measured
    table["lar_measured"] = lar.mean()
    table["spread_points"] = 100 * lar.agg(mean_difference)
    table = table.dropna(subset=["lar_replayed", "lar_measured"])
    table["gap_points"] = 100 * (table.lar_replayed - table.lar_measured)
    table["judged"] = table.tokens == table.groupby(list(JUDGED), dropna=False).tokens.transform("max")
    return table.reset_index()


def document(comparison: Comparison, command: str, calibrations: Sequence[Path] = ()) -> str:
    """The Markdown page: bars, every configuration, phases, and what it was measured on. calibrations: files of raw samples."""
    found = bars(comparison)
    lines = ["# Accuracy on held-out configurations", "", f"Made by `{command}`.", ""]
    lines += environment(comparison.rows)
    lines += [*verdict(found), ABOUT_BARS + "; LAR: the largest gap.", ""]
    both = comparison.table[comparison.table.sides == "both"]
    lines += configurations("Layer latency of fixed batches", both[both.workload == "batches"], "layer")
    lines += configurations("TPOT of served runs", both[both.workload == "serve"], "tpot")
    lines += _localities(free_running_lar(comparison.rows))
    return "\n".join([*lines, *_phases(comparison.rows), *_calibrations(calibrations)]) + "\n"


def verdict(found: Sequence[Bar]) -> list[str]:
    """A table of bars."""
    lines = ["", "| figure | value | at most | unit | spread of repeats | configurations | met |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for b in found:
        spread, met = "" if math.isnan(b.spread) else f"{b.spread:.1f}", "yes" if b.met else "NO"
        lines.append(f"| {b.what} | {b.figure:.1f} | {b.allowed:.1f} | {b.unit} | {spread} | {b.count} | {met} |")
    return [*lines, ""]


def said_of(found: Sequence[Bar]) -> list[str]:
    """The same for the terminal, a line each."""
    width = max((len(b.what) for b in found), default=0)
    return [
        f"{b.what:{width}s} {b.figure:6.1f} {b.unit} (at most {b.allowed:.1f}): {'met' if b.met else 'MISSED'}"
        for b in found
    ]


def environment(rows: pd.DataFrame) -> list[str]:
    """What these rows were measured on, in a line."""
    made = [json.loads(text) for text in rows.environment.dropna()]
    if not made:
        return []
    loads = [float(e["load_1min"]) for e in made if "load_1min" in e]
    names = ", ".join(f"{key} {made[0][key]}" for key in ("cpu", "cores", "torch", "python") if key in made[0])
    loaded = f"; load average while measuring {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    commits = ", ".join(sorted(set(rows.commit.dropna())))
    return [f"Machine: {names}{loaded}. Commit {commits}. CPU processes: no link speed may be derived from them."]


def configurations(title: str, lines: pd.DataFrame, name: str) -> list[str]:
    """A table of `name`_ms predicted and measured, a line for each configuration."""
    out = [f"## {title}", "", "| configuration | predicted ms | measured ms | error % | spread of repeats % |"]
    out += ["| --- | --- | --- | --- | --- |"]
    for _, line in lines.iterrows():
        predicted, real = line[f"{name}_ms_predicted"], line[f"{name}_ms_measured"]
        error, spread = line[f"{name}_error_pct"], line[f"{name}_spread_pct"]
        out.append(f"| {line.configuration} | {predicted:.2f} | {real:.2f} | {error:+.1f} | {spread:.1f} |")
    return [*out, ""]


def _localities(lines: pd.DataFrame) -> list[str]:
    out = ["## LAR of free-running served runs", "", *ABOUT_LAR, ""]
    out += [
        "| placement | scheduler | ranks | scope | tokens | simulated | measured | gap, points | spread of repeats | judged |"
    ]
    out += ["| --- |" + " --- |" * 9]
    for _, r in lines.sort_values(["ep_size", "placement", "scope", "tokens"]).iterrows():
        named = f"{r.placement} | {r.request_scheduler} | {r.ep_size} | {r.scope} | {r.tokens:.0f}"
        spread, judged = "" if pd.isna(r.spread_points) else f"{r.spread_points:.1f}", "yes" if r.judged else ""
        out.append(
            f"| {named} | {r.lar_replayed:.3f} | {r.lar_measured:.3f} | {r.gap_points:+.1f} | {spread} | {judged} |"
        )
    return [*out, ""]


def _phases(rows: pd.DataFrame) -> list[str]:
    """Where the time of a layer goes, predicted and measured, by ranks and flow: phases, exchange, waiting, and what is off."""
    batches = rows[rows.workload == "batches"]
    cells, off = [], []
    for (ranks, flow), group in batches.groupby(["ep_size", "flow"]):
        told, real = (_means(group[group.backend == side]) for side in ("simulator", "harness"))
        cells.append([str(ranks), str(flow), *(_pair(told[name], real[name]) for name in SHOWN)])
        for name in PHASES:
            beyond = told[name] - real[name]
            if abs(beyond) >= OFF * real["layer"]:
                share, percent = 100 * beyond / real["layer"], 100 * beyond / real[name]
                said = f"{name} {told[name]:.2f} / {real[name]:.2f} ms ({percent:+.0f} %), {share:+.0f} % of the layer"
                off.append(f"- {ranks} ranks, {flow}: {said}")
    return [
        "## Phases of fixed batches",
        "",
        *ABOUT_PHASES,
        "",
        "| ranks | flow | " + " | ".join(SHOWN) + " |",
        "| --- | --- |" + " --- |" * len(SHOWN),
        *("| " + " | ".join(line) + " |" for line in cells),
        "",
        f"Off by {100 * OFF:.0f} % of the layer or more:"
        if off
        else f"No phase is off by {100 * OFF:.0f} % of its layer.",
        "",
        *off,
    ]


def _calibrations(files: Sequence[Path]) -> list[str]:
    """What each calibration says of its own exchanges: how far its pools of ranks lie apart, and their mean from the truth."""
    lines = []
    for file in files:
        known = json.loads(file.read_text())
        ranks, samples = known["environment"]["ranks"], len(known["collectives_us"][0]) - KEY_LENGTH
        told = {line["operation"]: line for line in known["residuals"]}
        for name, line in told.items():
            if name.endswith(POOLS):
                op = name.removesuffix(POOLS)
                halves = told.get(op, {"median": math.nan})["median"]
                lines.append(
                    f"| {ranks} | {op} | {samples} | {halves:.0f} | {line['median']:.0f} | {line['p90']:.0f} |"
                )
    if not lines:
        return []
    head = "| ranks | operation | samples a size | halves of the samples, % | pools of ranks, % | at p90, % |"
    return ["", "## The calibrations themselves", "", *ABOUT_CALIBRATIONS, "", head, "| --- |" + " --- |" * 5, *lines]


def _means(rows: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of every phase, and of what several make up; NaN: not in the rows."""
    found = {name: float(rows[f"{name}_ms"].astype(float).mean()) for name in (*PHASES, *WAITS, "layer")}
    if not (rows.flow == "tp_shuffled").all():
        found["plan"] = math.nan  # done once a step, not in the layer
    exchange = [found[name] for name in EXCHANGES if not math.isnan(found[name])]
    return found | {"exchange": sum(exchange) if exchange else math.nan}


def _pair(told: float, real: float) -> str:
    """predicted / measured (error in per cent); empty where neither has the phase."""
    if math.isnan(told) and math.isnan(real):
        return ""
    both = " / ".join("-" if math.isnan(x) else f"{x:.2f}" for x in (told, real))
    return both if math.isnan(told) or not real > 0.05 else f"{both} ({100 * (told / real - 1):+.0f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the bars. Exit status 0 whether they are met or not: a miss is a result."""
    return write_page("accuracy", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    files = sorted(file for run in runs for file in run.glob("*.samples.json"))
    return document(comparison, command, files), said_of(bars(comparison))


if __name__ == "__main__":
    sys.exit(main())
