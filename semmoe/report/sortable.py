"""Tables of a page: headings that sort, cells that keep the whole number, a button that copies all as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import pandas as pd

Heads = Sequence[tuple[str, str]]  # (short heading, full name with unit) of every column of a group


def sortable(name: str, groups: Sequence[tuple[str, Heads]], lines: Iterable[Iterable[Any]], about: str) -> str:
    """A table with id `name`. groups: (title, columns); one line of headings more where a group has a title.

    lines: a value for every column. about: what a screen reader calls the region that scrolls.
    """
    heads = "".join(
        f'<th scope="col" data-name="{escape(full)}"><button type="button">{escape(short)}</button></th>'
        for _, columns in groups
        for short, full in columns
    )
    top = "".join(f'<th scope="colgroup" colspan="{len(columns)}">{escape(title)}</th>' for title, columns in groups)
    above = f'<tr class="groups">{top}</tr>' if any(title for title, _ in groups) else ""
    firsts = [i == 0 for _, columns in groups for i in range(len(columns))]
    body = "".join(
        f"<tr>{''.join(_cell(v, first) for v, first in zip(line, firsts, strict=True))}</tr>" for line in lines
    )
    content = f'<table class="sortable" id="{name}"><thead>{above}<tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    copy = f'<button type="button" class="copy" data-table="{name}">Copy as CSV</button>'
    tools = f'<p class="tools">{copy} <span role="status"></span></p>'
    return f'{tools}<div class="scroll" tabindex="0" role="region" aria-label="{escape(about)}">{content}</div>'


def _cell(value: Any, first: bool) -> str:
    kind = " g" if first else ""
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return f'<td class="missing{kind}">-</td>'
    if isinstance(value, bool | str):
        return f'<td class="t{kind}">{escape(str(value))}</td>'
    return f'<td class="n{kind}" data-v="{float(value)!r}">{_digits(float(value))}</td>'


def _digits(value: float) -> str:
    """Four significant digits, and all of a large number's instead of an exponent."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e12 else f"{value:.4g}"
