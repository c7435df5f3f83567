"""The report of a comparison: verdict, tables, figures, and where it was measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from tqdm import tqdm

from ..compare import Comparison
from ..files import write_atomically
from .answer import answer
from .catalog import FIGURES
from .embed import remove_files
from .page import Section, figure, page
from .tables import cards, environment, result_table, verdict_table
from .words import shared_line, summary_lines


def write_report(comparison: Comparison, path: str | Path, title: str, command: str) -> None:
    """Write the page, and every figure as PNG and SVG into the folder `figures` beside it.

    Every file is written whole or not at all; UserError when that fails. Figures of an earlier report that this comparison
    has no data for are removed.
    """
    path = Path(path)
    sections = [
        Section("summary", "Figures of the whole comparison", _summary(comparison)),
        Section("verdicts", "Verdict on every configuration", verdict_table(comparison.table)),
        Section("table", "Every configuration", result_table(comparison), TABLE),
        *_figures(comparison, path.parent / "figures"),
        Section("environment", "Where and how", f"<dl>{environment(comparison.rows)}</dl>"),
    ]
    write_atomically(path, page(title, sections, answer(comparison), shared_line(comparison), command))


TABLE = (
    "Planned: from the training part alone. Replayed: held-out routes in the simulator. Measured: counted in what was sent, "
    "or timed. A heading sorts."
)


def _summary(comparison: Comparison) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(comparison))
    return f'<div id="cards">{cards(comparison)}</div><ul>{lines}</ul>'


def _figures(comparison: Comparison, folder: Path) -> Iterator[Section]:
    bar = tqdm(FIGURES.items(), desc="figures", delay=2, disable=not sys.stderr.isatty(), leave=False)
    for name, entry in bar:
        drawn = entry.draw(comparison)
        if drawn is None:
            remove_files(name, folder)
        else:
            yield figure(name, entry.heading, drawn, entry.caption, entry.alt(comparison.table), folder)
