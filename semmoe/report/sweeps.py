"""Figures over a swept axis: the request rate of served runs, the batch size of fixed batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ..compare import Comparison
from .draw import BLACK, COLOURS, MARKERS, WIDTH_IN, clean, errors, legend_below, plain_ticks, subplots
from .reason import EXCHANGES

MOST_LINES = 8  # more cannot be told apart
ALL_PHASES = ("plan", "gate", "permute", "experts", "other", *EXCHANGES)


def rates(comparison: Comparison) -> Any:
    """Served requests at rising rates: how slow the slowest tenth becomes (90th percentile) as more requests finish a second; lower and further right is better. Lines with small marks are simulated, large marks measured (whiskers: all repeats). The dashed line is the SLO; a curve that turns upwards is at its limit."""  # noqa: E501
    lines = list(_series(comparison, "rate_rps"))
    if not lines:
        return None
    names = [n for n in ("ttft", "tpot") if comparison.rows[f"{n}_ms_p90"].notna().any()]
    figure, axes = subplots(1, len(names), figsize=(WIDTH_IN, 3.6), squeeze=False)
    for one, name in zip(axes[0], names, strict=True):
        for i, (label, keys) in enumerate(lines):
            points = [_rate_point(comparison, key, name) for key in keys]
            style: dict[str, Any] = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i % len(MARKERS)],
                "capsize": 2,
            }
            for backend, drawn in (
                ("simulator", {"markersize": 3}),
                ("harness", {"markersize": 6, "linestyle": "none"}),
            ):
                known = np.array([p[backend] for p in points if backend in p])
                if len(known):
                    ends = errors(known[:, 1], known[:, 2], known[:, 3])
                    one.errorbar(known[:, 0], known[:, 1], yerr=ends, label=label, **style, **drawn)
        for bound in comparison.rows[f"slo_{name}_ms"].dropna().unique():
            one.axhline(bound, color=BLACK, linestyle="--", linewidth=1)
            told = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom", "fontsize": 8}
            one.annotate(f"SLO {bound:g} ms", (0.02, bound), **told)
        one.set(xlabel="finished requests a second", xlim=(0, None), yscale="log")
        plain_ticks(one.yaxis, one.get_ylim())
        one.set_ylabel(f"{name.upper()}, 90th percentile (ms)")
    legend_below(figure, dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True)))
    return figure


def _rate_point(comparison: Comparison, key: str, name: str) -> dict[str, tuple[float, float, float, float]]:
    """{backend: (finished a second, p90 ms, least and most of the repeats)}."""
    points = {}
    rows = comparison.rows[comparison.rows.key == key]
    for backend, mine in rows[rows[f"{name}_ms_p90"].notna() & rows.throughput_rps.notna()].groupby("backend"):
        values = mine[f"{name}_ms_p90"].astype(float)
        points[str(backend)] = (
            float(mine.throughput_rps.astype(float).mean()),
            values.mean(),
            values.min(),
            values.max(),
        )
    return points


def batch_sizes(comparison: Comparison) -> Any:
    """Left: share of an MoE layer's time that is exchange (of all phases), the most that locality can save. Right: time saved against the better baseline, with its 95 % interval where measured; above 0 it pays, and where the line crosses 0 is the break-even batch size. Lines with small marks are predicted, large marks measured."""  # noqa: E501
    lines = list(_series(comparison, "batch_tokens"))
    if not lines:
        return None
    figure, (left, right) = subplots(1, 2, figsize=(WIDTH_IN, 3.6))
    right.axhline(0, color=BLACK, linewidth=1)
    table = comparison.table.set_index("key")
    for i, (label, keys) in enumerate(lines):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        size = np.array([table.batch_tokens[key] / table.ep_size[key] for key in keys], dtype=float)
        for backend, line in (("simulator", "-"), ("harness", "none")):
            share = np.array([_share(comparison, key, backend) for key in keys])
            left.plot(size, 100 * share, linestyle=line, markersize=6 if line == "none" else 3,
                      label=label if backend == "simulator" else None, **style)  # fmt: skip
        gains = table.loc[keys]
        measured = gains.layer_ms_measured.notna().to_numpy()
        values = gains.gain_pct.to_numpy(dtype=float)
        right.plot(size[~measured], values[~measured], linestyle="-", markersize=3, **style)
        ends = errors(values, gains.gain_low_pct, gains.gain_high_pct)
        right.errorbar(
            size[measured], values[measured], yerr=ends[:, measured], linestyle="none", capsize=3, markersize=6, **style
        )
    for one in (left, right):
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter("{x:g}")
        one.set_xlabel("tokens a rank in a batch")
    left.set(ylabel="exchange (% of an MoE layer)", ylim=(0, 100))
    right.set_ylabel("time saved (% of the better baseline)")
    legend_below(figure, dict(zip(*reversed(left.get_legend_handles_labels()), strict=True)))
    return figure


def _share(comparison: Comparison, key: str, backend: str) -> float:
    """Exchange over the sum of all phases (of several machines, measured phases hold their waiting and sum to more)."""
    rows = comparison.rows[(comparison.rows.key == key) & (comparison.rows.backend == backend)]
    means = {name: float(rows[f"{name}_ms"].astype(float).mean()) for name in ALL_PHASES} if len(rows) else {}
    known = {name: ms for name, ms in means.items() if not math.isnan(ms)}
    whole = sum(known.values())
    return sum(known.get(name, 0.0) for name in EXCHANGES) / whole if whole else math.nan


def _series(comparison: Comparison, axis: str) -> Iterator[tuple[str, list[str]]]:
    """(name, keys in order of the axis) of configurations that differ in `axis` alone; those with two values or more."""
    table = comparison.table[comparison.table[axis].notna()]
    others = [name for name in comparison.axes if name != axis and not name.startswith(f"workload.{axis}")]
    by_name: dict[str, list[Any]] = {}
    for _, line in table.iterrows():
        words = [str(line[name]) for name in others if not _absent(line[name])]
        by_name.setdefault(" / ".join(words), []).append(line)
    swept = [(clean(name), lines) for name, lines in by_name.items() if len({line[axis] for line in lines}) > 1]
    for name, lines in swept[:MOST_LINES]:
        yield name or "the one configuration", [line.key for line in sorted(lines, key=lambda line: line[axis])]


def _absent(value: Any) -> bool:
    return value is None or value == "-" or (isinstance(value, float) and pd.isna(value))
