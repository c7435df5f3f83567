"""The HTML page: verdicts, table, figures. No network: styles, script and SVG figures stand in the one file."""

from __future__ import annotations

import io
import json
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from ..compare import Comparison
from ..results import write_atomically
from .figures import FIGURES
from .words import summary_lines

COLUMNS = {
    "configuration": "configuration", "lar_planned": "LAR planned", "lar_replayed": "LAR replayed",
    "lar_measured": "LAR measured", "fan_out_planned": "fan-out planned", "fan_out_replayed": "fan-out replayed",
    "fan_out_measured": "fan-out measured", "bytes_per_token_planned": "bytes/token planned",
    "bytes_per_token_replayed": "bytes/token replayed", "bytes_per_token_measured": "bytes/token measured",
    "replay_equal": "replayed = measured", "imbalance_step": "imbalance (step)", "imbalance_total": "imbalance (total)",
    "active_experts": "active experts", "layer_ms_predicted": "layer predicted (ms)",
    "layer_ms_measured": "layer measured (ms)", "layer_error_pct": "error (%)", "layer_spread_pct": "spread of repeats (%)",
    "ttft_ms_predicted": "TTFT predicted (ms)", "ttft_ms_measured": "TTFT measured (ms)",
    "tpot_ms_predicted": "TPOT predicted (ms)", "tpot_ms_measured": "TPOT measured (ms)",
    "e2e_ms_predicted": "E2E predicted (ms)", "e2e_ms_measured": "E2E measured (ms)", "verdict": "verdict",
    "config_id": "config id",
}  # fmt: skip


def write_report(comparison: Comparison, path: str | Path, title: str, command: str) -> None:
    """Write the page, and every figure as PNG and SVG into the folder `figures` beside it."""
    path = Path(path)
    folder = path.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for name, (heading, draw) in FIGURES.items():
        figure = draw(comparison)
        if figure is None:
            continue
        svg = _svg(figure, name)
        write_atomically(folder / f"{name}.svg", svg)
        figure.savefig(folder / f"{name}.png", dpi=150)
        _close(figure)
        about = escape((draw.__doc__ or "").strip())
        sections.append(f'<figure id="{name}" role="img" aria-label="{escape(heading)}"><h2>{escape(heading)}</h2>{svg}'
                        f"<figcaption>{about}</figcaption></figure>")  # fmt: skip
    write_atomically(path, _page(comparison, title, command, "\n".join(sections)))


def _page(comparison: Comparison, title: str, command: str, figures: str) -> str:
    files = resources.files(__package__)
    lines = summary_lines(comparison)
    verdicts = "".join(
        f"<li><b>{escape(str(line.configuration))}</b>: {escape(str(line.verdict))}</li>"
        for line in comparison.table.itertuples()
    )
    summary = "".join(f"<p>{escape(line)}</p>" for line in lines)
    replace = {
        "TITLE": escape(title), "COMMAND": escape(command), "STYLE": (files / "page.css").read_text(),
        "SCRIPT": (files / "page.js").read_text(), "SUMMARY": summary, "VERDICTS": verdicts,
        "TABLE": _table(comparison.table), "FIGURES": figures, "ENVIRONMENT": _environment(comparison.rows),
    }  # fmt: skip
    page = (files / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: replace[match.group(1)], page)


def _table(table: pd.DataFrame) -> str:
    shown = {k: v for k, v in COLUMNS.items() if k in table and table[k].notna().any()}
    head = "".join(f'<th scope="col" tabindex="0">{escape(v)}</th>' for v in shown.values())
    body = "".join("<tr>" + "".join(_cell(row[k]) for k in shown) + "</tr>" for _, row in table.iterrows())
    return f'<table id="results"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    if value is None or pd.isna(value):
        return "<td>-</td>"
    return f'<td class="n" data-v="{float(value)!r}">{float(value):.4g}</td>'


def _environment(rows: pd.DataFrame) -> str:
    """The distinct environments (the load as a range), provenances, clusters and commits of the rows."""
    loads, lines = [], []
    for text in rows.environment.dropna():
        try:
            pairs = dict(json.loads(text))
        except (json.JSONDecodeError, TypeError, ValueError):
            pairs = {"environment": text}
        load = pairs.pop("load_1min", None)
        loads += [float(load)] if load is not None else []
        lines.append(", ".join(f"{k} {v}" for k, v in pairs.items()))
    lines += [f"load average while measuring {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    lines += [f"{backend}: {told}" for (backend, told), _ in rows.groupby(["backend", "provenance"])]
    lines.append("cluster " + ", ".join(sorted({f"{r.cluster} ({r.cluster_digest})" for r in rows.itertuples()})))
    lines.append("commit " + ", ".join(sorted(set(rows.commit.dropna()))))
    return "".join(f"<p>{escape(line)}</p>" for line in dict.fromkeys(lines))


def _svg(figure: Any, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Title": name})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # ids must differ between the figures that share a page
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    return re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
