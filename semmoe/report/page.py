"""A self-contained page: a verdict in plain words, then sections of tables, figures and text. No network.

    from semmoe.report.page import Verdict, figure, page, prose, table
    sections = [table("levers", "Levers", frame), figure("map", "Break-even", drawn, caption, alt, folder / "figures")]
    write_atomically(path, page("semmoe advise: ...", sections, Verdict("even", "No gain expected here.", [("Why", "...")])))

Any command can build one: `compare`, `advise`, sweeps. Figures are drawn with `draw.subplots`, in the report's style.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from .. import __version__
from .embed import svg_and_files
from .sortable import sortable

SIGNS = {"gain": "▲", "loss": "▼", "even": "=", "open": "?"}


@dataclass(frozen=True)
class Verdict:
    """The box on top. kind: "gain" (pays), "loss" (costs), "even" (no gain), "open" (undecided, or predicted alone).

    headline: the answer in one plain sentence. points: (question, answer) such as ("By how much", "..."), in that order.
    """

    kind: str
    headline: str
    points: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self.points)
        sign = f'<span class="sign" aria-hidden="true">{SIGNS[self.kind]}</span>'
        line = f'<p class="headline">{sign} {escape(self.headline)}</p>'
        return f'<section id="verdict" class="{self.kind}">{line}<dl>{told}</dl></section>'


@dataclass(frozen=True)
class Section:
    """One part of a page. name: its id, unique on the page; html: safe markup (everything foreign in it is escaped)."""

    name: str
    heading: str
    html: str
    about: str = ""
    kind: str = ""

    def render(self) -> str:
        about = f'<p class="about">{escape(self.about)}</p>' if self.about else ""
        kind = f' class="{self.kind}"' if self.kind else ""
        return f'<section id="{self.name}"{kind}><h2>{escape(self.heading)}</h2>{about}{self.html}</section>'


def prose(name: str, heading: str, lines: Sequence[str]) -> Section:
    """Sentences as a list."""
    return Section(name, heading, "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")


def table(name: str, heading: str, frame: pd.DataFrame, about: str = "") -> Section:
    """A sortable table that copies as CSV. Columns are full names with units; the frame's index is left out."""
    groups = [("", [(str(column), str(column)) for column in frame.columns])]
    return Section(name, heading, sortable(f"{name}-table", groups, frame.itertuples(index=False), heading), about)


def figure(name: str, heading: str, drawn: Any, caption: str, alt: str, folder: Path) -> Section:
    """A matplotlib figure (closed here), which `folder` also gets as NAME.png and NAME.svg.

    caption: what to see in it, below the heading; alt: the same for who does not see it, with the figures that matter.
    UserError when a file cannot be written.
    """
    svg = svg_and_files(drawn, name, heading, alt, folder)
    beside = f"{folder.name}/{name}"
    files = f'<p class="files"><a href="{beside}.svg">SVG</a> <a href="{beside}.png">PNG</a></p>'
    inner = f'<figure><div class="drawing">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>{files}'
    return Section(name, heading, inner, kind="figure")


def page(
    title: str,
    sections: Sequence[Section],
    verdict: Verdict | None = None,
    about: str = "",
    command: str = "",
) -> str:
    """The whole page as text. about: what it is of, in a line; command: what made it."""
    files = resources.files(__package__)
    links = "".join(f'<li><a href="#{s.name}">{escape(s.heading)}</a></li>' for s in sections)
    replace = {
        "TITLE": escape(title), "ABOUT": escape(about), "COMMAND": escape(command), "VERSION": escape(__version__),
        "STYLE": (files / "page.css").read_text(encoding="utf-8"), "SCRIPT": (files / "page.js").read_text(encoding="utf-8"),
        "VERDICT": verdict.html() if verdict else "", "CONTENTS": links if len(sections) > 2 else "",
        "BODY": "\n".join(section.render() for section in sections),
    }  # fmt: skip
    text = (files / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replace[match.group(1)], text)
