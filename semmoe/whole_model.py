"""Whole models: attention, MoE layers and steps of fixed batches, predicted by a fresh calibration and measured.

    python -m semmoe.whole_model RUN [RUN ...] --out results/whole_model.md --command "make whole-model"

Bars are those of accuracy.py, for each model and number of ranks. A layer is a MoE layer inside its block, an attention is
that of one block, each behind a barrier of its own; a step is a pass from the first block to the LM head without barriers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from .accuracy import ABOUT_BARS, Bar, configurations, environment, latency, said_of, verdict
from .compare import Comparison, compare
from .errors import UserError
from .page_command import write_page

FIGURES = ("layer", "attention", "step")
ABOUT = (
    "layer: a MoE layer inside its block. attention: that of one block. Both mean over blocks and batches, each behind a",
    "barrier of its own, the slowest rank's. step: from the first block to the LM head, no barrier between, planning included.",
)


def bars(comparison: Comparison) -> list[Bar]:
    """Median and p90 error of every figure, for each model and number of ranks; then configurations whose Traffic differs."""
    found = []
    for what, lines in _groups(comparison):
        for name in FIGURES:
            found += latency(f"{what}, {name}", lines, name)
        differ = float(lines.replay_equal.str.startswith("no").sum())
        found.append(Bar(f"{what}, Traffic that differs", differ, 0.0, len(lines), "configurations"))
    return found


def document(comparison: Comparison, command: str) -> str:
    """The Markdown page."""
    lines = ["# Whole models: predicted and measured", "", f"Made by `{command}`.", ""]
    lines += [*environment(comparison.rows), "", *ABOUT, *verdict(bars(comparison)), f"{ABOUT_BARS}.", ""]
    for what, of in _groups(comparison):
        for name in FIGURES:
            lines += configurations(f"{what}: {name}", of, name)
    return "\n".join(lines).rstrip() + "\n"


def _groups(comparison: Comparison) -> list[tuple[str, pd.DataFrame]]:
    """("model, N ranks", lines of the table) of whole models that were both predicted and measured. UserError: none."""
    table = comparison.table
    both = table[(table.sides == "both") & (table.scope == "full_model") & (table.workload == "batches")]
    if both.empty:
        raise UserError(
            "no whole model (scope=full_model, workload=batches) was both simulated and measured in these runs"
        )
    rows = comparison.rows
    form_of = {
        key: json.loads(axes)["workload"].get("form", "") for key, axes in zip(rows.key, rows["axes"], strict=True)
    }
    named = [f"{form_of[key]} / {name}" for key, name in zip(both.key, both.configuration, strict=True)]
    both = both.assign(configuration=named)  # batch sizes may tell prefill from decode, but do not say so
    return [(f"{model}, {ranks} ranks", lines) for (model, ranks), lines in both.groupby(["model", "ep_size"])]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print the bars. Exit status 0 whether they are met or not: a miss is a result."""
    return write_page("whole_model", __doc__ or "", _page, argv)


def _page(runs: list[Path], command: str) -> tuple[str, list[str]]:
    comparison = compare(runs)
    return document(comparison, command), said_of(bars(comparison))


if __name__ == "__main__":
    sys.exit(main())
