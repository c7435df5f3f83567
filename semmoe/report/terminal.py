"""A comparison as fixed-width text: one table a theme (locality, time, serving), each no wider than the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..compare import Comparison
from ..results import SERVED
from .answer import answer
from .draw import clean
from .words import NAMES, shared_line, summary_lines

GAP = "  "
KEY_SHARE = 0.52  # of the width: most that the columns that name a configuration may take beside figures
SIDES = ("predicted", "measured")


@dataclass(frozen=True)
class Col:
    """A column: two lines of heading, a cell of text for every configuration, numbers to the right."""

    top: str
    bottom: str
    cells: list[str]
    left: bool = False

    @property
    def width(self) -> int:
        """Characters of the widest line; a cell may have several."""
        return max(len(line) for text in (self.top, self.bottom, *self.cells) for line in text.split("\n"))


def render(comparison: Comparison, width: int = 140) -> str:
    """The whole comparison: what is shared, the tables, the summary, a verdict a configuration, and the answer last.

    Where the axes are too wide to stand beside the figures, they get a table of their own, and the others go by number.
    """
    table = comparison.table
    key = _key_columns(table, comparison.axes)
    parts = [f"all configurations: {shared_line(comparison)}"]
    if _total(key) > width * KEY_SHARE:
        parts.append(f"configurations\n{_text(_narrowed(key, width))}")
        key = key[:1]
    served = table[[f"{n}_ms_{side}" for n in SERVED for side in SIDES]].notna().any(axis=1)
    every = pd.Series(True, index=table.index)
    for title, columns, shown in (
        ("locality", _locality(table), every),
        ("balance", _balance(table), every),
        ("time", _times(table, ("layer", "step"), 3), every),
        ("served requests", _times(table, SERVED, 1), served),
    ):
        if columns:
            blocks = _blocks(_only(key, shown), _only(columns, shown), width)
            parts += [f"{title}{' (continued)' if i else ''}\n{block}" for i, block in enumerate(blocks)]
    parts.append("\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in summary_lines(comparison)))
    said = [f"#{i} {line.configuration}: {line.verdict}" for i, line in enumerate(table.itertuples(), 1)]
    parts.append(
        "\n".join(textwrap.fill(clean(s), width, subsequent_indent="     ", break_on_hyphens=False) for s in said)
    )
    verdict = answer(comparison)
    points = [textwrap.fill(clean(f"{name}: {text}"), width, subsequent_indent="  ") for name, text in verdict.points]
    parts.append("\n".join([textwrap.fill(verdict.headline, width), *points]))
    return "\n\n".join(parts)


def _key_columns(table: pd.DataFrame, axes: Sequence[str]) -> list[Col]:
    """Number and axes of every configuration."""
    columns = [Col("", "#", [str(i + 1) for i in range(len(table))])]
    for name in axes:
        top, _, bottom = name.replace("_", " ").rpartition(" ")
        columns.append(Col(top, bottom, [clean(_plain(v)) for v in table[name]], left=True))
    return columns


def _total(columns: Sequence[Col]) -> int:
    return sum(c.width + len(GAP) for c in columns)


def _narrowed(columns: list[Col], width: int) -> list[Col]:
    """The widest column is narrowed (its cells wrap) until all fit into `width`."""
    widths = [c.width for c in columns]
    while sum(widths) + len(GAP) * len(widths) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    return [
        Col(
            c.top[:w],
            c.bottom[:w],
            ["\n".join(textwrap.wrap(t, w, break_on_hyphens=False)) or "-" for t in c.cells],
            c.left,
        )
        for c, w in zip(columns, widths, strict=True)
    ]


def _only(columns: Sequence[Col], shown: pd.Series[bool]) -> list[Col]:
    """The columns with the cells of these configurations."""
    return [Col(c.top, c.bottom, [t for t, keep in zip(c.cells, shown, strict=True) if keep], c.left) for c in columns]


def _plain(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _numbers(table: pd.DataFrame, column: str, digits: int, scale: float = 1.0, sign: str = "") -> list[str]:
    return ["-" if v is None or math.isnan(v) else f"{v * scale:{sign}.{digits}f}" for v in table[column]]


def _locality(table: pd.DataFrame) -> list[Col]:
    columns = []
    for name, heading, digits, scale in (
        ("lar", "LAR", 3, 1.0), ("fan_out", "fan-out", 2, 1.0), ("bytes_per_token", "kB/token", 1, 1e-3),
    ):  # fmt: skip
        for i, when in enumerate(("planned", "replayed", "measured")):
            columns.append(Col(heading if i == 0 else "", when[:4], _numbers(table, f"{name}_{when}", digits, scale)))
    return columns


def _balance(table: pd.DataFrame) -> list[Col]:
    equal = [v.split(" ")[0] if v.startswith("no") else {"other steps": "other"}.get(v, v) for v in table.replay_equal]
    columns = [Col("replayed =", "measured", equal)]
    for name, top, bottom in (("imbalance_step", "imbalance", "step"), ("imbalance_total", "imbalance", "total"),
                              ("home_imbalance", "imbalance", "home"), ("active_experts", "active", "experts")):  # fmt: skip
        columns.append(Col(top, bottom, _numbers(table, name, 2 if "imb" in name else 1)))
    return columns


def _times(table: pd.DataFrame, names: Sequence[str], digits: int) -> list[Col]:
    columns: list[Col] = []
    for n in names:
        if table[[f"{n}_ms_predicted", f"{n}_ms_measured"]].notna().any(axis=None):
            unit = "End-to-end" if n == "e2e" else NAMES[n]
            columns += [Col(f"{unit} ms", "pred", _numbers(table, f"{n}_ms_predicted", digits)),
                        Col("", "meas", _numbers(table, f"{n}_ms_measured", digits)),
                        Col("error", "%", _numbers(table, f"{n}_error_pct", 0, sign="+")),
                        Col("spread", "%", _numbers(table, f"{n}_spread_pct", 0))]  # fmt: skip
    return columns


def _blocks(key: list[Col], columns: list[Col], width: int) -> list[str]:
    """Tables of at most `width` columns; those that do not fit continue in a further table with the same key."""
    blocks: list[str] = []
    part: list[Col] = []
    room = width - _total(key)
    for column in columns:
        if part and _total(part) + column.width > room:
            blocks.append(_text([*key, *part]))
            part = []
        part.append(column)
    return [*blocks, _text([*key, *part])]


def _text(columns: list[Col]) -> str:
    widths = [c.width for c in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [t.ljust(w) if c.left else t.rjust(w) for t, w, c in zip(cells, widths, columns, strict=True)]
        return GAP.join(padded).rstrip()

    lines = [line([c.top for c in columns]), line([c.bottom for c in columns]), GAP.join("-" * w for w in widths)]
    for i in range(len(columns[0].cells)):
        cells = [c.cells[i].split("\n") for c in columns]
        for j in range(max(map(len, cells))):
            lines.append(line([cell[j] if j < len(cell) else "" for cell in cells]))
    return "\n".join(lines)
