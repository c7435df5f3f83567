"""The page's tables as HTML: key figures, verdicts, the sortable table of everything, and where it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from ..compare import Comparison
from .sortable import sortable

WHEN = ("planned", "replayed", "measured")
MARKS = {  # class, sign, meaning for who does not see the colour
    "faster": ("gain", "▲", "faster"),
    "slower": ("loss", "▼", "slower"),
    "baseline": ("base", "◆", "baseline"),
    "no gain": ("even", "=", "no gain"),
    "undecided": ("even", "?", "undecided"),
}
TIMES = {"layer": "layer", "step": "step", "ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end"}
Columns = list[tuple[str, str, str]]


def columns_of(comparison: Comparison) -> list[tuple[str, Columns]]:
    """Groups of (column of the table, short heading, full name with unit); what nobody knows is left out."""
    groups: list[tuple[str, Columns]] = [("configuration", [(n, n.replace("_", " "), n) for n in comparison.axes])]
    for name, heading in (("lar", "LAR"), ("fan_out", "fan-out (ranks)"), ("bytes_per_token", "bytes/token")):
        groups.append((heading, [(f"{name}_{w}", w, f"{heading} {w}") for w in WHEN]))
    groups.append(("check", [("replay_equal", "replayed = measured", "replayed = measured")]))
    balance = [("imbalance_step", "step"), ("imbalance_total", "total"), ("home_imbalance", "home")]
    groups.append(("imbalance", [(column, short, f"imbalance {short}") for column, short in balance]))
    groups.append(("active", [("active_experts", "experts", "active experts")]))
    for name, heading in TIMES.items():
        shown = [("ms_predicted", "predicted", "predicted (ms)"), ("ms_measured", "measured", "measured (ms)"),
                 ("error_pct", "error %", "error (%)"), ("spread_pct", "spread %", "spread of repeats (%)")]  # fmt: skip
        groups.append(
            (f"{heading} (ms)", [(f"{name}_{column}", short, f"{heading} {full}") for column, short, full in shown])
        )
    groups.append(("measured", [("repeats", "repeats", "measured repeats")]))
    gain = [("gain_pct", "gain"), ("gain_low_pct", "low"), ("gain_high_pct", "high")]
    groups.append(("against the better baseline (%)", [(column, short, f"gain {short} (%)") for column, short in gain]))
    groups.append(("identity", [("sides", "sides", "sides"), ("config_id", "config id", "config id")]))
    known = [(title, [c for c in columns if comparison.table[c[0]].notna().any()]) for title, columns in groups]
    return [(title, columns) for title, columns in known if columns]


def result_table(comparison: Comparison) -> str:
    """Every configuration; two heading lines, of which the second sorts. Cells keep the whole number for sorting and CSV."""
    groups = columns_of(comparison)
    heads = [("", [("#", "#")]), *((title, [(short, full) for _, short, full in cells]) for title, cells in groups)]
    names = [column for _, cells in groups for column, _, _ in cells]
    lines = ([i, *(line[n] for n in names)] for i, (_, line) in enumerate(comparison.table.iterrows(), 1))
    return sortable("results", heads, lines, "table of every configuration")


def verdict_table(table: pd.DataFrame) -> str:
    """Number, configuration and verdict of every line, marked by sign and colour."""
    lines = []
    for i, line in enumerate(table.itertuples(), 1):
        style, sign, told = mark(str(line.verdict))
        cells = f'<td class="n">{i}</td><td class="sign"><span role="img" aria-label="{told}">{sign}</span></td>'
        cells += f"<td>{escape(str(line.configuration))}</td><td>{escape(str(line.verdict))}</td>"
        lines.append(f'<tr class="{style}">{cells}</tr>')
    names = ("#", '<span class="hidden">sign</span>', "configuration", "verdict")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'<table class="marked"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def mark(verdict: str) -> tuple[str, str, str]:
    """(class, sign, word) of a verdict; its leading words decide."""
    for word in ("no gain", "undecided", "baseline"):
        if verdict.startswith(word):
            return MARKS[word]
    start = verdict.split(" than ")[0]
    return MARKS["faster" if "faster" in start else "slower" if "slower" in start else "undecided"]


def cards(comparison: Comparison) -> str:
    """The figures to read first."""
    summary, table = comparison.summary, comparison.table
    shown: list[tuple[str, str, str]] = []
    if table.gain_low_pct.notna().any():
        shown.append(("Best gain that holds", *_best_gain(table)))
    equal = summary["replay_equal"]
    if summary["both"]:
        note = f"{equal['no']} differ" if equal["no"] else "bytes, LAR and fan-out, to the last row"
        shown.append(("Replayed = measured", f"{equal['yes']} of {summary['both']}", note))
    if layer := summary.get("layer"):
        spread = layer["median_spread_pct"]
        beside = "one repeat, spread unknown" if math.isnan(spread) else f"repeats spread by {spread:.0f} %"
        note = f"p90 {layer['p90_error_pct']:.0f} %; {beside}"
        shown.append(("Layer time, median error", f"{layer['median_error_pct']:.1f} %", note))
    if gap := summary.get("lar_gap_points"):
        note = f"off in the median; {gap['max']:.1f} at most"
        shown.append((f"Planned LAR against {gap['against']}", f"{gap['median']:.1f} points", note))
    parts = ("what", "value", "note")
    inner = ["".join(f'<div class="{p}">{escape(t)}</div>' for p, t in zip(parts, one, strict=True)) for one in shown]
    return "".join(f'<div class="card">{one}</div>' for one in inner)


def _best_gain(table: pd.DataFrame) -> tuple[str, str]:
    lines: list[tuple[int, Any]] = list(enumerate(table.itertuples(), 1))
    decided = [(i, line) for i, line in lines if line.gain_low_pct > 0]
    if not decided:
        return "none", "no measured gain's interval lies above 0"
    number, best = max(decided, key=lambda pair: pair[1].gain_pct)
    return f"{best.gain_pct:.0f} %", f"#{number}, 95 % interval {best.gain_low_pct:.0f} to {best.gain_high_pct:.0f} %"


def environment(rows: pd.DataFrame) -> str:
    """The distinct environments (the load as a range), provenances, clusters, commits and traces of the rows."""
    loads: list[float] = []
    facts: list[tuple[str, str]] = []
    for text in rows.environment.dropna():
        pairs = _pairs(text)
        load = pairs.pop("load_1min", None)
        loads += [float(load)] if isinstance(load, int | float) else []
        facts.append(("measured on", ", ".join(f"{k} {v}" for k, v in pairs.items())))
    if loads:
        facts.append(("load average while measuring", f"{min(loads):.1f} to {max(loads):.1f}"))
    measured = rows[rows.backend == "harness"]
    paths = sorted({f"transport {r.transport}, kernels {r.kernel_path}, {r.dtype}" for r in measured.itertuples()})
    facts += [("measured over", path) for path in paths]
    facts += [(f"times of the {backend}", str(told)) for (backend, told), _ in rows.groupby(["backend", "provenance"])]
    facts.append(("cluster", _listed(f"{r.cluster} (content {r.cluster_digest})" for r in rows.itertuples())))
    facts.append(("trace", _listed(f"{r.trace} (content {r.trace_digest})" for r in rows.itertuples())))
    facts.append(("seed", _listed(str(seed) for seed in rows.seed)))
    facts.append(("commit ('+': with changes)", _listed(rows.commit.dropna())))
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in dict.fromkeys(facts))


def _pairs(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (json.JSONDecodeError, TypeError, ValueError):
        return {"environment": text}


def _listed(words: Any) -> str:
    unique: Sequence[str] = sorted({str(word) for word in words})
    return ", ".join(unique) or "-"
