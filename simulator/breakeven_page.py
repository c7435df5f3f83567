"""The break-even map as a page: the verdict in words, the least LAR that pays as a table, a map for every cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semmoe.files import write_atomically
from semmoe.report import Verdict, figure, page, table
from semmoe.report.draw import GREY, PALE, WIDTH_IN, subplots

from .breakeven import WORTH_PCT, BreakEven

EDGES_PCT = (-100, -40, -20, -10, -5, 5, 10, 20, 40, 60, 80, 100)  # of the colours; the middle one is "no difference"
COLOURS = (
    "#5E2500", "#8C3B00", "#D55E00", "#EFB58E", "#F4F4F4", "#D3E5F2", "#A6CCE6", "#6DADD6", "#2F86BF", "#0B5A91", "#08306B",
)  # fmt: skip
CAPTION = (
    "Time saved against the better baseline, by the LAR that a policy reaches (upwards) and the tokens of a rank in one batch. "
    "Blue pays, orange costs, near-white is within 5 %: no difference. Grey: below chance (1 / ranks), or not measured on this "
    "cluster. Ranks are loaded evenly; at a few tokens a rank, steps come from the measured curves of small messages."
)


def write_page(path: Path, maps: Sequence[BreakEven], about: str, command: str) -> None:
    """Write the page, and the figure as PNG and SVG into `figures` beside it."""
    alt = f"Break-even maps of {', '.join(m.cluster for m in maps)}; {about}. " + " ".join(
        told for _, told in _points(maps)
    )
    note = f"Least LAR: from it on, {WORTH_PCT:g} % of the layer's time is saved. Empty: not even LAR 1 saves as much."
    sections = [
        table("least_lar", "Least LAR that pays", least_lar(maps), note),
        figure("breakeven", "Where locality pays", draw(maps), CAPTION, alt, path.parent / "figures"),
    ]
    write_atomically(path, page(f"semmoe: break-even of locality, {about}", sections, verdict(maps), about, command))


def verdict(maps: Sequence[BreakEven]) -> Verdict:
    """Whether any policy could pay, cluster by cluster: what perfect locality would save at most."""
    worth = [m.cluster for m in maps if _most(m)[0] >= WORTH_PCT]
    if len(maps) == 1:
        head = f"Locality {'can' if worth else 'cannot'} pay here: perfect locality saves {_most(maps[0])[0]:.0f} % at most."
    else:
        head = f"Locality can pay on {len(worth)} of {len(maps)} clusters" + (
            f": {', '.join(worth)}." if worth else "."
        )
    return Verdict("gain" if worth else "even", f"{head} This is a prediction for evenly loaded ranks.", _points(maps))


def _points(maps: Sequence[BreakEven]) -> list[tuple[str, str]]:
    told = []
    for m in maps:
        most, tokens = _most(m)
        pays = [(t, least) for t, least in zip(m.tokens_per_rank, m.least_lar, strict=True) if least is not None]
        text = f"at most {most:.0f} % saved (LAR 1, {tokens} tokens a rank)"
        if pays:
            t, least = min(pays, key=lambda pair: pair[1])
            text += f"; {WORTH_PCT:g} % from {pays[0][0]} tokens a rank on at LAR {pays[0][1]:.2f}, "
            text += f"soonest at LAR {least:.2f} with {t} tokens (chance is {1 / m.ep_size:.2f})"
        told.append((m.cluster, f"{text}. Times: {m.provenance}."))
    return told


def _most(m: BreakEven) -> tuple[float, int]:
    """(largest gain in percent, tokens a rank where it is)."""
    gain_IJ = np.array(m.gain_pct, dtype=float)
    j = int(np.nanargmax(gain_IJ) % gain_IJ.shape[1])
    return float(np.nanmax(gain_IJ)), m.tokens_per_rank[j]


def least_lar(maps: Sequence[BreakEven]) -> pd.DataFrame:
    """tokens a rank, then for each cluster the least LAR that pays, the better baseline and its layer time."""
    frame = pd.DataFrame({"tokens a rank": maps[0].tokens_per_rank})
    for m in maps:
        frame[f"{m.cluster}: least LAR"] = np.array(m.least_lar, dtype=float)
        frame[f"{m.cluster}: saved at LAR 1 (%)"] = np.array(m.gain_pct[-1], dtype=float)
        frame[f"{m.cluster}: better baseline"] = m.baseline
        frame[f"{m.cluster}: its layer (ms)"] = np.array(m.baseline_ms, dtype=float)
    return frame


def terminal(maps: Sequence[BreakEven], about: str) -> str:
    """What the page says first, as text."""
    said = verdict(maps)
    return "\n".join([about, said.headline, *(f"  {name}: {text}" for name, text in said.points)])


def draw(maps: Sequence[BreakEven]) -> Any:
    """One map a cluster, all with one colour scale."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    width = WIDTH_IN if columns > 1 else 5.6
    figure, axes = subplots(rows, columns, figsize=(width, 0.6 + 3.4 * rows), squeeze=False, sharey=True)
    norm, shades = BoundaryNorm(EDGES_PCT, len(COLOURS)), ListedColormap(COLOURS)
    for one, m in zip(axes.flat, maps, strict=False):
        gain_IJ = np.clip(np.array(m.gain_pct, dtype=float), EDGES_PCT[0], EDGES_PCT[-1] - 1e-9)
        one.set_facecolor(PALE)
        mesh = one.pcolormesh(
            m.tokens_per_rank, m.lar, gain_IJ, cmap=shades, norm=norm, shading="nearest", rasterized=True
        )
        one.set_xscale("log", base=2)
        one.set(xlabel="tokens a rank in a batch", ylim=(m.lar[0], 1.0))
        one.xaxis.set_major_formatter("{x:g}")
        one.grid(visible=False)
        one.set_title(f"{m.cluster}, {m.ep_size} ranks", fontsize=9, loc="left")
    for row in axes:
        row[0].set_ylabel("LAR (share of assignments at home)")
    for one in list(axes.flat)[len(maps) :]:
        one.set_axis_off()
    bar = figure.colorbar(
        mesh, ax=axes, label="time saved against the better baseline (%)", ticks=EDGES_PCT, spacing="uniform"
    )
    bar.outline.set_edgecolor(GREY)
    return figure
