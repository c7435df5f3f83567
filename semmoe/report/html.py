"""The HTML page: verdicts, table, figures. No network: styles, script and SVG figures stand in the one file."""

from __future__ import annotations

import io
import os
import re
import sys
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .. import __version__
from ..compare import Comparison
from ..errors import UserError
from ..results import write_atomically
from .draw import close
from .figures import FIGURES
from .tables import cards, environment, result_table, verdict_table
from .words import shared_line, summary_lines


def write_report(comparison: Comparison, path: str | Path, title: str, command: str) -> None:
    """Write the page, and every figure as PNG and SVG into the folder `figures` beside it.

    Every file is written whole or not at all; UserError when that fails. Figures of an earlier report that this comparison
    has no data for are removed.
    """
    path = Path(path)
    folder = path.parent / "figures"
    sections = []
    bar = tqdm(FIGURES.items(), desc="figures", delay=2, disable=not sys.stderr.isatty(), leave=False)
    for name, entry in bar:
        figure = entry.draw(comparison)
        if figure is None:
            for ending in ("svg", "png"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
            continue
        figure.draw_without_rendering()  # lays out once; both files then take the same places
        figure.set_layout_engine("none")
        svg = _svg(figure, name, entry.heading, entry.alt(comparison.table))
        write_atomically(folder / f"{name}.svg", f'<?xml version="1.0" encoding="utf-8"?>\n{svg}')
        _save_png(figure, folder / f"{name}.png")
        close(figure)
        heading = f'<h2>{escape(entry.heading)}</h2><p class="about">{escape(entry.caption)}</p>'
        sections.append(f'<section id="{name}" class="figure">{heading}<figure>{svg}</figure></section>')
    write_atomically(path, _page(comparison, title, command, "\n".join(sections)))


def _page(comparison: Comparison, title: str, command: str, figures: str) -> str:
    files = resources.files(__package__)
    replace = {
        "TITLE": escape(title), "COMMAND": escape(command), "VERSION": escape(__version__),
        "SHARED": escape(shared_line(comparison)), "STYLE": (files / "page.css").read_text(encoding="utf-8"),
        "SCRIPT": (files / "page.js").read_text(encoding="utf-8"), "CARDS": cards(comparison),
        "SUMMARY": "".join(f"<li>{escape(line)}</li>" for line in summary_lines(comparison)),
        "VERDICTS": verdict_table(comparison.table), "TABLE": result_table(comparison), "FIGURES": figures,
        "ENVIRONMENT": environment(comparison.rows),
    }  # fmt: skip
    page = (files / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replace[match.group(1)], page)


def _svg(figure: Any, name: str, heading: str, alt: str) -> str:
    """The figure as an SVG element that says what it shows and whose ids are its own on the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)
    told = f'<title id="{name}-title">{escape(heading)}</title><desc id="{name}-desc">{escape(alt)}</desc>'
    return re.sub(
        r"<svg([^>]*)>",
        lambda m: f'<svg role="img" aria-labelledby="{name}-title {name}-desc"{m[1]}>{told}',
        text,
        count=1,
    )


def _save_png(figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, format="png", dpi=150)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
