"""What the figures share: colours, style, grouped bars, and labels that no name can break.

Colours are Okabe and Ito's, which stay apart for every kind of colour vision; hatches keep them apart in grey print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

BLUE, ORANGE, GREEN, RED, SKY, YELLOW, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#F0E442", "#CC79A7")  # fmt: skip
BLACK, GREY, PALE, GRID, PAPER = "#1A1A1A", "#6B6B6B", "#E8EEF2", "#E0E0E0", "#FFFFFF"
WIDTH_IN = 9.0
COLOURS, MARKERS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, BLACK), "os^Dv"
PHASES = {"attention": "#B8A0C8", "plan": GREY, "gate": YELLOW, "permute": PURPLE, "srs": SKY, "dispatch": BLUE,
          "experts": GREEN, "combine": ORANGE, "sag": RED, "other": "#BBBBBB"}  # fmt: skip

STYLE: Any = {
    "font.size": 9, "font.family": ["sans-serif"], "text.parse_math": False, "axes.labelcolor": BLACK, "text.color": BLACK,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "hatch.linewidth": 0.6,
    "svg.fonttype": "none", "svg.hashsalt": "semmoe", "figure.constrained_layout.use": True, "figure.max_open_warning": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One bar in every group: name, a value for each configuration (NaN: no bar), colour, hatch, ends of intervals."""

    name: str
    values: Sequence[float]
    colour: str
    hatch: str = ""
    ends: tuple[Sequence[float], Sequence[float]] | None = None


def subplots(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """(figure, axes) in the report's style, drawn without a display; matplotlib is loaded here and not before."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, **options)


def close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)


def clean(text: str) -> str:
    """Printable characters only: what a policy is called must break neither a terminal nor an SVG file."""
    return "".join(c if c.isprintable() else "?" for c in text)


def labels(table: pd.DataFrame) -> list[str]:
    """`#3 dp / semantic / ...` of every line, over at most three lines."""
    named = (clean(f"#{i} {name}") for i, name in enumerate(table.configuration, 1))
    return ["\n".join(textwrap.wrap(text, 44, max_lines=3, break_on_hyphens=False)) for text in named]


def legend_below(figure: Any, handles: dict[str, Any]) -> None:
    """A legend of {name: handle} below the axes, in as many columns as the names leave room for; the figure grows by it."""
    widest_in = 0.6 + 0.058 * max(map(len, handles), default=1)  # of 7.5 point text, and its sign
    columns = max(1, min(3, int(WIDTH_IN / widest_in)))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.15 * -(-len(handles) // columns) + 0.15)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=7.5)


def row_in(names: Sequence[str]) -> float:
    """Height in inches that a line of the figure needs, so that the longest of its labels touches no other."""
    return 0.12 + 0.15 * max((name.count("\n") + 1 for name in names), default=1)


def bars(names: list[str], series: Sequence[Series], label: str, start: float = 0.0, absent: str = "") -> Any:
    """Horizontal bars, a group for each name, that begin at `start` (1: perfect balance). `absent` stands where all is NaN."""
    height = 0.8 / len(series)
    figure, axes = subplots(figsize=(WIDTH_IN, 0.9 + max(0.17 * len(series) + 0.1, row_in(names)) * len(names)))
    places = np.arange(len(names))
    values_SN = np.array([one.values for one in series], dtype=float)
    for i, (one, values) in enumerate(zip(series, values_SN, strict=True)):
        at = places + (i - (len(series) - 1) / 2) * height
        style = {"color": one.colour, "hatch": one.hatch, "edgecolor": "white", "linewidth": 0}
        axes.barh(at, values - start, height * 0.94, left=start, label=one.name, **style)
        if one.ends is not None:
            axes.errorbar(values, at, xerr=errors(values, *one.ends), fmt="none", ecolor=BLACK, elinewidth=1, capsize=2)
    for place in places[np.isnan(values_SN).all(axis=0)]:
        beside(axes, start, place, absent)
    frame(axes, names, label)
    axes.set_xlim(left=start)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(series), borderaxespad=0.2)
    return figure


def beside(axes: Any, x: float, y: float, text: str) -> None:
    """Small grey text a little to the right of (x, y); an SVG file would drop leading blanks."""
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", color=GREY, fontsize=7.5)


def frame(axes: Any, names: list[str], label: str) -> None:
    """Names down the left, first at the top, and the label with its unit below."""
    axes.set_yticks(np.arange(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(label)


def errors(values: Any, low: Any, high: Any) -> Any:
    """Lengths of error bars to both sides; 0 where an end is unknown."""
    values = np.asarray(values, dtype=float)
    sides = [values - np.asarray(low, dtype=float), np.asarray(high, dtype=float) - values]
    return np.nan_to_num(np.clip(sides, 0, None))


def plain_ticks(axis: Any, ends: Any) -> None:
    """Round numbers instead of powers of ten, also where the data span less than a decade."""
    from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

    decades = 10.0 ** np.arange(np.floor(np.log10(ends[0])), np.ceil(np.log10(ends[1])) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if ends[1] / ends[0] < 20 else (1, 3)
    ticks = np.unique([d * s for d in decades for s in steps])
    axis.set_major_locator(FixedLocator(ticks[(ticks >= ends[0]) & (ticks <= ends[1])]))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
