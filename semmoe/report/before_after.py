"""The baseline beside the configuration that the verdict is about: who sends to whom, and where a step's time goes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compare import Comparison
from .answer import judged_settings
from .draw import BLACK, GREY, PALE, PAPER, PHASES, WIDTH_IN, clean, subplots

SHOWN = (("assignments served there", "% of the home rank's"), ("sent by dispatch", "kB a step"))  # (what, unit)
MOST_NUMBERS = 16  # ranks; more cells than that are too small for their number
RAMP = ("#F4F8FB", "#C6DBEA", "#7FB2D6", "#3584B8", "#0B5A91", "#08306B")  # one hue, darker is more


def pair_traffic(comparison: Comparison) -> Any:
    """Baseline on the left (absent where every rank holds every token), the verdict's configuration on the right; one colour scale a row. Above: where a home rank's (token, expert) assignments are served, in percent of them; the framed diagonal stays local, and its mean is the LAR. Below: payload bytes that dispatch sends between each pair of ranks. An even picture costs least: the busiest row or column sets the time."""  # noqa: E501
    sides = []
    for name, line in _pair(comparison):
        found = _pairs(comparison, line)
        if found is not None:
            sides.append((name, line.lar_replayed if math.isnan(line.lar_measured) else line.lar_measured, *found))
    return heat_maps(sides) if sides else None


def heat_maps(sides: Sequence[tuple[str, float, NDArray[np.float64], NDArray[np.float64]]]) -> Any:
    """Side by side: (name, LAR, percent of a home rank's assignments by serving rank [G, G], kB sent a step [G, G])."""
    count = len(sides)
    figure, axes = subplots(2, count, figsize=(WIDTH_IN if count > 1 else WIDTH_IN / 2 + 0.6, 8.4), squeeze=False)
    for row, (what, unit) in enumerate(SHOWN):
        top = max(float(np.nanmax(found[row])) for _, _, *found in sides) or 1.0
        for one, (name, counted, *found) in zip(axes[row], sides, strict=True):
            mesh = _heat(one, found[row], top, framed=row == 0)
            lar = "" if row else f", LAR {counted:.2f}"
            one.set_title(f"{name}{lar}\n{what}", fontsize=9, loc="left")
        figure.colorbar(mesh, ax=list(axes[row]), label=unit, fraction=0.03)
    return figure


def _pair(comparison: Comparison) -> list[tuple[str, Any]]:
    """("baseline", its line) and ("with NAME", the best line) of the setting that the verdict is about."""
    judged = judged_settings(comparison)
    if not judged:
        return []
    best, base = judged[0].line, judged[0].base
    return [(f"baseline: {_short(base)}", base), (f"after: {_short(best)}", best)]


def _short(line: Any) -> str:
    words = [line.flow, line.placement, line.request_scheduler, line.token_scheduler]
    return clean(" / ".join(str(w) for w in words if w != "-"))[:48]


def _pairs(comparison: Comparison, line: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """(percent of assignments, kB a step) [home rank][serving rank]; None where tokens have no home or none was kept."""
    rows = comparison.rows[comparison.rows.key == line.key].sort_values("backend", kind="stable")  # harness first
    rows = rows[rows.assignment_pairs.notna()]
    if rows.empty:
        return None
    row = rows.iloc[0]
    assigned_GG, distinct_GG = (
        np.array(json.loads(text), dtype=float) for text in (row.assignment_pairs, row.rank_pairs)
    )
    return shares_and_bytes(
        assigned_GG, distinct_GG, str(row.dispatcher), float(row.dispatch_bytes or 0) / max(row.steps, 1)
    )


def shares_and_bytes(
    assignments_GG: NDArray[np.float64], distinct_GG: NDArray[np.float64], dispatcher: str, step_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(percent of assignments, kB a step) [home rank][serving rank], from counted pairs and what dispatch sent in a step."""
    whole_G1 = assignments_GG.sum(axis=1, keepdims=True)
    sent_GG = (distinct_GG if dispatcher == "a2a_dedup" else assignments_GG).astype(float)
    if dispatcher == "allgather_rs":
        sent_GG = np.repeat(whole_G1.astype(float), len(assignments_GG), axis=1)
    np.fill_diagonal(sent_GG, np.nan)
    return 100 * assignments_GG / np.maximum(whole_G1, 1), sent_GG * (step_bytes / max(np.nansum(sent_GG), 1) / 1e3)


def _heat(axes: Any, values_GG: NDArray[np.float64], top: float, framed: bool) -> Any:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    ranks = len(values_GG)
    shades = LinearSegmentedColormap.from_list("ramp", RAMP)
    mesh = axes.pcolormesh(values_GG, cmap=shades, vmin=0, vmax=top, edgecolors=PAPER, linewidth=0.5)
    for s, d in np.ndindex(ranks, ranks) if ranks <= MOST_NUMBERS else ():
        if not np.isnan(values_GG[s, d]):
            ink = "#000000" if values_GG[s, d] < 0.5 * top else "#FEFEFE"  # on the cell's own colour, dark page or not
            text = f"{values_GG[s, d]:.3g}" if values_GG[s, d] < 1000 else f"{values_GG[s, d]:.0f}"
            axes.text(d + 0.5, s + 0.5, text, ha="center", va="center", color=ink, fontsize=8 if ranks <= 8 else 6)
    for g in range(ranks) if framed else ():
        axes.add_patch(Rectangle((g, g), 1, 1, fill=False, edgecolor=BLACK, linewidth=1.4))
    ticks = np.arange(ranks) if ranks <= MOST_NUMBERS else np.arange(0, ranks, ranks // 8)
    axes.set(xticks=ticks + 0.5, xticklabels=ticks, yticks=ticks + 0.5, yticklabels=ticks, aspect="equal",
             xlabel="serving rank", ylabel="home rank", facecolor=PALE)  # fmt: skip
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.invert_yaxis()
    return mesh


def step_timeline(comparison: Comparison) -> Any:
    """Predicted time of the first MoE layers of one step, rank by rank; both on one axis. A coloured bar is a rank at work or in an exchange, pale is waiting for the slowest rank. Where the lower half ends sooner, time is saved."""  # noqa: E501
    sides = [(name, told) for name, line in _pair(comparison) if (told := _timeline(comparison, line)) is not None]
    if not sides:
        return None
    ranks = max(len(told["spans"][0][4]) for _, told in sides)
    figure, axes = subplots(
        len(sides), 1, figsize=(WIDTH_IN, 1.2 + (0.7 + 0.22 * ranks) * len(sides)), sharex=True, squeeze=False
    )
    shown: dict[str, Any] = {}
    for one, (name, told) in zip(axes[:, 0], sides, strict=True):
        for phase, layer, start_ms, duration_ms, busy_ms_G in told["spans"]:
            for rank, busy_ms in enumerate(busy_ms_G):
                one.barh(rank, duration_ms, 0.8, left=start_ms, color=PALE, linewidth=0)
                shown[phase] = one.barh(rank, busy_ms, 0.8, left=start_ms, color=PHASES.get(phase, GREY), linewidth=0)
            if layer and phase == told["spans"][0][0]:
                one.axvline(start_ms, color=BLACK, linewidth=0.8)
        layers = 1 + max(layer for _, layer, *_ in told["spans"])
        one.set_title(
            f"{name}: {layers} of {told['layers']} MoE layers, {told['tokens']} tokens a step", fontsize=9, loc="left"
        )
        one.set(yticks=np.arange(len(busy_ms_G)), ylabel="rank", xlim=(0, None))
        if len(busy_ms_G) > MOST_NUMBERS:
            one.set_yticks(np.arange(0, len(busy_ms_G), len(busy_ms_G) // 8))
        one.invert_yaxis()
        one.grid(visible=False, axis="y")
    axes[-1][0].set_xlabel("time since the first MoE layer began (ms, predicted)")
    names = [n for n in ("attention", *PHASES) if n in shown]
    figure.legend(
        [shown[n] for n in names], names, loc="outside upper left", ncols=9, columnspacing=1, handlelength=1.2
    )
    return figure


def _timeline(comparison: Comparison, line: Any) -> dict[str, Any] | None:
    rows = comparison.rows[(comparison.rows.key == line.key) & comparison.rows.step_timeline.notna()]
    told = json.loads(rows.iloc[0].step_timeline) if len(rows) else {"spans": []}
    return told if told["spans"] else None
