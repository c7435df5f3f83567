"""Figures of a comparison. Each is a function `(comparison) -> Figure | None`; None where it has nothing to show.

Colours are Okabe and Ito's, which stay apart for every kind of colour vision and in grey print (with hatches).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from ..compare import Comparison

BLUE, ORANGE, GREEN, RED, GREY, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666", "#56B4E9", "#F0E442", "#CC79A7")  # fmt: skip
PHASES = {"plan": GREY, "gate": YELLOW, "permute": PURPLE, "srs": SKY, "dispatch": BLUE, "experts": GREEN,
          "combine": ORANGE, "sag": RED, "other": "#BBBBBB"}  # fmt: skip


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.color": "#DDDDDD", "axes.axisbelow": True,
                         "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none",
                         "svg.hashsalt": "semmoe", "figure.constrained_layout.use": True})  # fmt: skip
    return plt


def _bars(names: list[str], series: list[tuple[str, list[float], str, str]], label: str, errors: Any = None) -> Any:
    """Grouped horizontal bars, one group a configuration; series of (name, values, colour, hatch)."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8.4, 0.9 + 0.42 * len(names)))
    height = 0.8 / len(series)
    places = np.arange(len(names))
    for i, (name, values, colour, hatch) in enumerate(series):
        at = places + (i - (len(series) - 1) / 2) * height
        axes.barh(at, values, height, label=name, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        if errors is not None and errors[i] is not None:
            axes.errorbar(values, at, xerr=errors[i], fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), frameon=False)
    return figure


def parity(comparison: Comparison) -> Any:
    """Predicted against measured layer latency, with the repeats' interval and a band of 20 %."""
    table = comparison.table[comparison.table.sides == "both"].dropna(
        subset=["layer_ms_predicted", "layer_ms_measured"]
    )
    if table.empty:
        return None
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.4, 4.6))
    both = table[["layer_ms_predicted", "layer_ms_measured"]].to_numpy(dtype=float)
    ends = np.array([both.min() * 0.8, both.max() * 1.25])
    axes.fill_between(ends, ends * 0.8, ends * 1.2, color="#EEEEEE", label="within 20 %")
    axes.plot(ends, ends, color=GREY, linewidth=1)
    for (flow, group), colour, marker in zip(table.groupby("flow"), (BLUE, ORANGE, GREEN, RED), "osD^", strict=False):
        low = group.layer_ms_measured - group.layer_ms_low
        high = group.layer_ms_high - group.layer_ms_measured
        axes.errorbar(group.layer_ms_measured, group.layer_ms_predicted, xerr=np.clip([low, high], 0, None), fmt=marker,
                      color=colour, label=flow, capsize=2, markersize=5)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured layer latency (ms)",
             ylabel="predicted layer latency (ms)")  # fmt: skip
    axes.legend(frameon=False)
    return figure


def latency(comparison: Comparison) -> Any:
    """Layer latency of every configuration, predicted and measured."""
    table = comparison.table
    measured = table.layer_ms_measured.to_numpy(dtype=float)
    interval = [np.nan_to_num(measured - table.layer_ms_low), np.nan_to_num(table.layer_ms_high - measured)]
    series = [("predicted", table.layer_ms_predicted.tolist(), SKY, ""), ("measured", measured.tolist(), BLUE, "//")]
    return _bars(table.configuration.tolist(), series, "layer latency (ms)", [None, np.clip(interval, 0, None)])


def locality(comparison: Comparison) -> Any:
    """LAR planned, replayed and measured."""
    table = comparison.table[comparison.table[["lar_planned", "lar_replayed", "lar_measured"]].notna().any(axis=1)]
    if table.empty:
        return None
    series = [(name, table[f"lar_{name}"].tolist(), colour, hatch) for name, colour, hatch in
              (("planned", YELLOW, ".."), ("replayed", SKY, ""), ("measured", BLUE, "//"))]  # fmt: skip
    return _bars(table.configuration.tolist(), series, "local activation rate (share of assignments)")


def fan_out(comparison: Comparison) -> Any:
    """Fan-out planned, replayed and measured."""
    table = comparison.table[comparison.table[["fan_out_replayed", "fan_out_measured"]].notna().any(axis=1)]
    if table.empty:
        return None
    series = [(name, table[f"fan_out_{name}"].tolist(), colour, hatch) for name, colour, hatch in
              (("planned", YELLOW, ".."), ("replayed", SKY, ""), ("measured", BLUE, "//"))]  # fmt: skip
    return _bars(table.configuration.tolist(), series, "distinct remote ranks a token")


def imbalance(comparison: Comparison) -> Any:
    """Expert-row imbalance a step and in total, and home imbalance; 1 is perfect balance."""
    table = comparison.table
    series = [(text, table[name].tolist(), colour, hatch) for name, text, colour, hatch in
              (("imbalance_step", "expert rows, a step", ORANGE, ""), ("imbalance_total", "expert rows, total", RED, "//"),
               ("home_imbalance", "tokens a home", GREY, ".."))]  # fmt: skip
    return _bars(table.configuration.tolist(), series, "busiest rank over the mean (1 = balanced)")


def per_layer(comparison: Comparison) -> Any:
    """LAR and fan-out by MoE layer."""
    rows = comparison.rows[comparison.rows.lar_per_layer.notna()]
    if rows.empty:
        return None
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
    names = dict(zip(comparison.table.config_id, comparison.table.configuration, strict=True))
    colours = [BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, "#000000"]
    for i, (config, group) in enumerate(rows.groupby("config_id", sort=False)):
        style = {
            "color": colours[i % 8],
            "linestyle": ("-", "--", ":")[i // 8 % 3],
            "marker": "os^Dv"[i % 5],
            "markersize": 3,
        }
        for axes, column in ((left, "lar_per_layer"), (right, "fan_out_per_layer")):
            values = [np.nan if v is None else v for v in json.loads(group.iloc[0][column])]
            if not np.isnan(values).all():
                axes.plot(np.arange(len(values)), values, label=names[config] if axes is left else None, **style)
    left.set(xlabel="MoE layer", ylabel="local activation rate")
    right.set(xlabel="MoE layer", ylabel="distinct remote ranks a token")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


def phases(comparison: Comparison) -> Any:
    """Where a layer's time goes: phases stacked, predicted (P) above measured (M)."""
    plt = _pyplot()
    names = comparison.table.configuration.tolist()
    figure, axes = plt.subplots(figsize=(8.4, 1.0 + 0.5 * len(names)))
    shown: set[str] = set()
    for place, config in enumerate(comparison.table.config_id):
        for shift, backend, hatch in ((-0.2, "simulator", ""), (0.2, "harness", "//")):
            rows = comparison.rows[(comparison.rows.config_id == config) & (comparison.rows.backend == backend)]
            left = 0.0
            for phase, colour in PHASES.items():
                value = rows[f"{phase}_ms"].astype(float).mean() if len(rows) else np.nan
                if pd.notna(value) and value > 0:
                    axes.barh(place + shift, value, 0.36, left=left, color=colour, hatch=hatch, edgecolor="white",
                              linewidth=0.4, label=None if phase in shown else phase)  # fmt: skip
                    shown.add(phase)
                    left += value
            if left:
                axes.text(left, place + shift, " P" if backend == "simulator" else " M", va="center", fontsize=7)
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("mean time of a phase on its slowest rank (ms); P predicted, M measured")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=9, frameon=False, fontsize=7, columnspacing=0.8)
    return figure if shown else None


def served(comparison: Comparison) -> Any:
    """TTFT, TPOT and end-to-end time of served runs."""
    table = comparison.table
    known = [
        n for n in ("ttft", "tpot", "e2e") if table[[f"{n}_ms_predicted", f"{n}_ms_measured"]].notna().any(axis=None)
    ]
    if not known:
        return None
    colours = {"ttft": (SKY, BLUE), "tpot": (YELLOW, ORANGE), "e2e": ("#99D8C9", GREEN)}
    series = [(f"{n.upper()} {w}", table[f"{n}_ms_{w}"].tolist(), colours[n][i], "//" * i)
              for n in known for i, w in enumerate(("predicted", "measured"))]  # fmt: skip
    figure = _bars(table.configuration.tolist(), series, "milliseconds (log)")
    figure.axes[0].set_xscale("log")
    return figure


FIGURES: dict[str, tuple[str, Callable[[Comparison], Any]]] = {
    "latency": ("Layer latency, predicted and measured", latency),
    "parity": ("Predicted against measured", parity),
    "phases": ("Where a layer's time goes", phases),
    "locality": ("Local activation rate: planned, replayed, measured", locality),
    "fan_out": ("Fan-out: planned, replayed, measured", fan_out),
    "per_layer": ("LAR and fan-out by layer", per_layer),
    "imbalance": ("Imbalance", imbalance),
    "served": ("Served requests", served),
}
