"""The accuracy table as text and Markdown, and the gate: a regression against the anchors fails, a drift warns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .row import Row

REGRESSION = 1.0  # points of the unit of a row by which a value with a bar may grow before it counts as a regression
DRIFT = 0.05  # change that is worth a word
Anchors = Mapping[str, Mapping[str, float]]


def table(rows: Sequence[Row], skipped: Mapping[str, str]) -> str:
    """Markdown: one line a row, values beside their bars, notes below."""
    lines = ["| what | points | values | bar | verdict |", "| --- | --- | --- | --- | --- |"]
    notes: list[str] = []
    for row in rows:
        values = ", ".join(f"{name} {_number(value)}" for name, value in row.values.items())
        bars = ", ".join(f"{name} {bar:g}" for name, bar in row.bars.items()) or "reported"
        verdict = "-" if not row.bars else "within" if not row.missed else "MISSED: " + ", ".join(row.missed)
        mark = ""
        if row.note:
            notes.append(f"[{len(notes) + 1}] {row.note}")
            mark = f" [{len(notes)}]"
        lines.append(f"| {row.what.strip()}{mark} | {row.count} | {values} | {bars} | {verdict} |")
    lines += [f"| {what} | 0 | | | skipped: {why} |" for what, why in skipped.items()]
    return "\n".join([*lines, "", *(f"{note}  " for note in notes)])


def _number(value: float) -> str:
    return f"{value:.2f}"


def judge(rows: Sequence[Row], anchors: Anchors) -> tuple[list[str], list[str]]:
    """(regressions, drifts) in words. A value that crossed its bar, or grew by more than REGRESSION, is a regression.

    Rows without an anchor are only held to their bars; a value that shrank is a drift, so that the anchor is renewed.
    """
    regressions, drifts = [], []
    for row in rows:
        known = anchors.get(row.key, {})
        for name, value in row.values.items():
            anchor = known.get(name)
            bar = row.bars.get(name)
            crossed = bar is not None and not abs(value) <= bar and (anchor is None or abs(anchor) <= bar)
            grown = anchor is not None and bar is not None and not abs(value) <= abs(anchor) + REGRESSION
            words = f"{row.key} {name}: {_number(value)}" + ("" if anchor is None else f", anchor {_number(anchor)}")
            if crossed or grown:
                regressions.append(words + ("" if bar is None else f", bar {bar:g}"))
            elif anchor is not None and not abs(value - anchor) <= DRIFT:
                drifts.append(words)
    return regressions, drifts


def anchors_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    return {row.key: {name: round(value, 4) for name, value in row.values.items()} for row in rows}
