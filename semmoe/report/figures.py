"""Figures of a comparison. Each is a function `(comparison) -> Figure | None`; None where it has nothing to show."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import numpy as np
import pandas as pd

from ..compare import Comparison
from ..results import SERVED
from .draw import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PALE,
    PHASES,
    RED,
    SKY,
    WIDTH_IN,
    Series,
    bars,
    beside,
    clean,
    errors,
    frame,
    labels,
    legend_below,
    plain_ticks,
    row_in,
    subplots,
)  # fmt: skip

LAYER_COLUMNS = {"lar_per_layer": ("local activation rate", 0), "fan_out_per_layer": ("fan-out (remote ranks a token)", 0),
                 "imbalance_per_layer": ("busiest rank / mean, a step", 1)}  # fmt: skip
LEGEND_LINES = 24  # more lines than this cannot be told apart: they show the spread alone
THREE = (("planned", ORANGE, ""), ("replayed", SKY, "...."), ("measured", BLUE, "////"))


def gain(comparison: Comparison) -> Any:
    """Layer time (end-to-end time of served requests) saved against the better honest baseline; measured where there is a measurement, with the 95 % interval of the paired repeats. An interval that crosses 0 is no gain; what leaves the frame is cut."""  # noqa: E501
    table = comparison.table
    if table.gain_pct.isna().all():
        return None
    names = labels(table)
    figure, axes = subplots(figsize=(WIDTH_IN, 0.9 + row_in(names) * len(table)))
    axes.axvline(0, color=BLACK, linewidth=1)
    shown: set[str] = set()
    lines: list[Any] = list(table.itertuples())
    for place, line in enumerate(lines):
        if pd.isna(line.gain_pct):
            beside(axes, 0, place, clean(line.verdict)[:30])
            continue
        name, colour, marker = _judged(line)
        ends = [[line.gain_low_pct], [line.gain_high_pct]]
        axes.errorbar([line.gain_pct], [place], xerr=errors([line.gain_pct], *ends), fmt=marker, color=colour, markersize=7,
                      capsize=3, elinewidth=1.5, label=None if name in shown else name)  # fmt: skip
        shown.add(name)
    frame(axes, names, "time saved against the better baseline (%)")
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, -120), min(high, 110))  # an interval that leaves the picture says enough
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, borderaxespad=0.2)
    return figure


def _judged(line: Any) -> tuple[str, str, str]:
    if pd.isna(line.layer_ms_measured):
        return "predicted only", GREY, "d"
    if pd.isna(line.gain_low_pct):
        return "one repeat, undecided", GREY, "x"
    if line.gain_low_pct <= 0 <= line.gain_high_pct:
        return "no gain (interval includes 0)", GREY, "o"
    return ("faster", BLUE, "^") if line.gain_pct > 0 else ("slower", RED, "v")


def latency(comparison: Comparison) -> Any:
    """Mean time of one MoE layer on its slowest rank. Whiskers: all repeats, widened by each repeat's bootstrap interval."""
    table = comparison.table
    predicted = Series("predicted", table.layer_ms_predicted.tolist(), SKY)
    ends = (table.layer_ms_low.tolist(), table.layer_ms_high.tolist())
    real = Series("measured", table.layer_ms_measured.tolist(), BLUE, "////", ends)
    return bars(labels(table), [predicted, real], "layer latency (ms)")


def parity(comparison: Comparison) -> Any:
    """Predicted against measured layer latency; a point on the line is a perfect prediction, the band is 20 % to either side. Whiskers: interval of the repeats. Numbers are those of the table."""  # noqa: E501
    table = comparison.table.assign(number=np.arange(1, len(comparison.table) + 1))
    table = table.dropna(subset=["layer_ms_predicted", "layer_ms_measured"])
    if table.empty:
        return None
    figure, axes = subplots(figsize=(5.6, 5.0))
    columns = ["layer_ms_predicted", "layer_ms_measured", "layer_ms_low", "layer_ms_high"]
    known = table[columns].to_numpy(dtype=float)
    ends = np.array([np.nanmin(known) * 0.85, np.nanmax(known) * 1.15])
    axes.fill_between(ends, ends * 0.8, ends * 1.2, color=PALE, label="within 20 %", linewidth=0)
    axes.plot(ends, ends, color=GREY, linewidth=1)
    for (flow, group), colour, marker in zip(table.groupby("flow"), (BLUE, ORANGE, GREEN, RED), "osD^", strict=False):
        real = group.layer_ms_measured
        axes.errorbar(real, group.layer_ms_predicted, xerr=errors(real, group.layer_ms_low, group.layer_ms_high), fmt=marker,
                      color=colour, label=clean(str(flow)), capsize=2, markersize=6, elinewidth=1)  # fmt: skip
    for i, line in enumerate(table.sort_values("layer_ms_measured").itertuples()):
        axes.annotate(f"{line.number}", (line.layer_ms_measured, line.layer_ms_predicted), ha="center", fontsize=8,
                      xytext=(0, (8, -14)[i % 2]), textcoords="offset points")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", xlabel="measured layer latency (ms)",
             ylabel="predicted layer latency (ms)")  # fmt: skip
    plain_ticks(axes.xaxis, ends)
    plain_ticks(axes.yaxis, ends)
    axes.legend(loc="upper left")
    return figure


def phases(comparison: Comparison) -> Any:
    """Mean time of each phase on the critical path of a layer: predicted above, measured (hatched) below; the black mark shows the layer. Measured over several machines, a phase holds its waiting, and they may sum to more."""  # noqa: E501
    table = comparison.table
    figure, axes = subplots(figsize=(WIDTH_IN, 1.0 + 0.5 * len(table)))
    shown: set[str] = set()
    for place, line in enumerate(table.itertuples()):
        rows = comparison.rows[comparison.rows.key == line.key]
        sides = (("simulator", "predicted", -0.2, ""), ("harness", "measured", 0.2, "////"))
        for backend, side, shift, hatch in sides:
            end = _stack(axes, rows[rows.backend == backend], place + shift, hatch, shown)
            if end:
                beside(axes, np.nanmax([end, getattr(line, f"layer_ms_{side}")]), place + shift, side)
                whole = getattr(line, f"layer_ms_{side}")
                axes.plot([whole, whole], [place + shift - 0.2, place + shift + 0.2], color=BLACK, linewidth=1.6)
    frame(axes, labels(table), "time of a phase (ms)")
    axes.set_xlim(0, axes.get_xlim()[1] * 1.07)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    axes.legend([handles[n] for n in PHASES if n in handles], [n for n in PHASES if n in handles], loc="lower left",
                bbox_to_anchor=(0, 1.0), ncols=9, columnspacing=1, handlelength=1.2, borderaxespad=0.2)  # fmt: skip
    return figure if shown else None


def _stack(axes: Any, rows: pd.DataFrame, at: float, hatch: str, shown: set[str]) -> float:
    """Draw the phases of these rows end to end and give where the last one ends; `shown` keeps the legend's names."""
    left = 0.0
    for phase, colour in PHASES.items():
        value = rows[f"{phase}_ms"].astype(float).mean() if len(rows) else np.nan
        if pd.notna(value) and value > 0:
            axes.barh(at, value, 0.36, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4,
                      label=None if phase in shown else phase)  # fmt: skip
            shown.add(phase)
            left += value
    return left


def locality(comparison: Comparison) -> Any:
    """Share of (token, expert) assignments served on the token's home rank; more is better. Planned knows the training part alone; replayed and measured should be equal."""  # noqa: E501
    return _three(comparison, "lar", "local activation rate (share of assignments)")


def fan_out(comparison: Comparison) -> Any:
    """Distinct remote ranks a token travels to in a layer; fewer is better."""
    return _three(comparison, "fan_out", "fan-out (distinct remote ranks a token)")


def _three(comparison: Comparison, name: str, label: str) -> Any:
    table = comparison.table
    if table[[f"{name}_{when}" for when, *_ in THREE]].isna().all(axis=None):
        return None
    series = [Series(when, table[f"{name}_{when}"].tolist(), colour, hatch) for when, colour, hatch in THREE]
    return bars(labels(table), series, label, absent="not defined: every rank holds every token")


def per_layer(comparison: Comparison) -> Any:
    """LAR, fan-out and imbalance of every MoE layer: measured, or replayed where nothing was measured. A layer out of line is where a placement fails, or where the model routes otherwise. Beyond 24 configurations the lines show their spread alone; the table has the figures."""  # noqa: E501
    figure, every = subplots(1, 3, figsize=(WIDTH_IN, 3.0))
    drawn = False
    for i, (name, line) in enumerate(zip(labels(comparison.table), comparison.table.itertuples(), strict=True)):
        rows = comparison.rows[comparison.rows.key == line.key].sort_values("backend", kind="stable")  # harness first
        style = {
            "color": COLOURS[i % 8],
            "linestyle": ("-", "--", ":")[i // 8 % 3],
            "marker": MARKERS[i % 5],
            "markersize": 4,
        }
        for axes, column in zip(every, LAYER_COLUMNS, strict=True):
            known = rows[column].dropna()
            values = np.array(json.loads(known.iloc[0]) if len(known) else [], dtype=float)
            if len(values) and not np.isnan(values).all():
                axes.plot(np.arange(len(values)), values, label=name.replace("\n", " "), **style)
                drawn = True
    for axes, (label, least) in zip(every, LAYER_COLUMNS.values(), strict=True):
        axes.set(xlabel="MoE layer", ylabel=label, ylim=(least, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
    if len(comparison.table) <= LEGEND_LINES:
        legend_below(figure, {n: h for axes in every for h, n in zip(*axes.get_legend_handles_labels(), strict=True)})
    return figure if drawn else None


def imbalance(comparison: Comparison) -> Any:
    """Busiest rank over the mean; 1 is perfect balance. A step's imbalance drives its time; the total is over all steps."""
    table = comparison.table
    series = [Series("expert rows, a step", table.imbalance_step.tolist(), ORANGE),
              Series("expert rows, total", table.imbalance_total.tolist(), BLUE, "////"),
              Series("tokens at home, total", table.home_imbalance.tolist(), GREY, "....")]  # fmt: skip
    if all(np.isnan(np.asarray(s.values, dtype=float)).all() for s in series):
        return None
    return bars(labels(table), series, "busiest rank / mean (1: balanced)", start=1.0, absent="balanced or not known")


def served(comparison: Comparison) -> Any:
    """Served requests: time to first token, time per output token, end to end; means over requests."""
    table = comparison.table
    names = [n for n in SERVED if table[[f"{n}_ms_predicted", f"{n}_ms_measured"]].notna().any(axis=None)]
    if not names:
        return None
    shown = table[table[[f"{n}_ms_{w}" for n in names for w in ("predicted", "measured")]].notna().any(axis=1)]
    every = dict(zip(table.key, labels(table), strict=True))
    figure, axes = subplots(1, len(names), figsize=(WIDTH_IN, 1.4 + 0.5 * len(shown)), sharey=True, squeeze=False)
    for one, name in zip(axes[0], names, strict=True):
        for shift, side, colour, hatch in ((-0.2, "predicted", SKY, ""), (0.2, "measured", BLUE, "////")):
            values = shown[f"{name}_ms_{side}"].astype(float)
            if values.isna().all():
                continue
            one.barh(
                np.arange(len(shown)) + shift, values, 0.38, color=colour, hatch=hatch, edgecolor="white", label=side
            )
        frame(
            one,
            ["\n".join(textwrap.wrap(every[key].replace("\n", " "), 30)) for key in shown.key],
            f"{name.upper()} (ms)",
        )
    axes[0][0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
    return figure
