"""A drawn figure as an SVG element of the page, and as PNG and SVG files beside it."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import Any

from ..files import replacing, write_atomically
from .draw import BLACK, GREY, GRID, PALE, PAPER, close

# what follows the page's light or dark ground; every other colour is the same on both
FOLLOWS = {BLACK: "--ink", GREY: "--soft", GRID: "--grid", PALE: "--pale", PAPER: "--paper"}


def svg_and_files(figure: Any, name: str, heading: str, alt: str, folder: Path) -> str:
    """Write NAME.svg and NAME.png into `folder` and give the SVG element for a page. The figure is closed.

    Every file is written whole or not at all; UserError when that fails.
    """
    figure.draw_without_rendering()  # lays out once; both files then take the same places
    figure.set_layout_engine("none")
    svg = _svg(figure, name, heading, alt)
    write_atomically(folder / f"{name}.svg", f'<?xml version="1.0" encoding="utf-8"?>\n{svg}')
    with replacing(folder / f"{name}.png") as file:
        figure.savefig(file, format="png", dpi=150)
    close(figure)
    return themed(svg)


def remove_files(name: str, folder: Path) -> None:
    """Take away the files of a figure that has nothing to show any more."""
    for ending in ("svg", "png"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def themed(svg: str) -> str:
    """The SVG with ink, greys and ground taken from the page's style, so that it is readable on dark pages too."""
    for colour, variable in FOLLOWS.items():
        svg = svg.replace(f": {colour.lower()}", f": var({variable})")
    return svg


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
