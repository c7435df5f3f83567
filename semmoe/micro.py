"""The paper's micro-benchmark as a page: all-to-all and layer time against the local activation rate.

    semmoe simulate -m experiment=micro; semmoe measure -m experiment=micro
    python -m semmoe.micro results/runs/micro --out results/micro.md

The routes have a dial (`trace.local_rate`); the page shows the LAR that was replayed or counted, not the dial.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import pandas as pd

from .errors import UserError
from .page_command import write_page
from .results import read_rows

SIDES = ("simulator", "harness")
CURVE = ("all_to_all_ms", "experts_ms", "layer_ms")
AROUND = ("plan_ms", "srs_ms", "sag_ms", "layer_ms")
SETTING = ["cluster", "model", "ep_size", "dtype", "batch_tokens"]


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per configuration of flow dp, by rising LAR: all-to-all (dispatch + combine), experts and layer, mean over
    repeats, columns "simulator layer_ms", "harness layer_ms", ..., and the spread of measured repeats in per cent."""
    dp = rows[rows.flow == "dp"].copy()
    dp["all_to_all_ms"] = dp.dispatch_ms.fillna(0.0).astype(float) + dp.combine_ms.fillna(0.0).astype(float)
    dp["lar"] = dp.lar_replayed.fillna(dp.lar_measured).astype(float)
    lines = []
    for key, group in dp.groupby([*SETTING, "dispatcher", "config_id"], dropna=False):
        line = dict(zip([*SETTING, "dispatcher", "config_id"], key, strict=True)) | {"lar": group.lar.mean()}
        lines.append(line | _sides(group, CURVE))
    return pd.DataFrame(lines).sort_values([*SETTING, "dispatcher", "lar"], ignore_index=True) if lines else dp


def around(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per attention-TP flow: planning, reduce-scatter or SRS, all-gather or SAG, layer."""
    tp = rows[rows.flow != "dp"]
    lines = []
    for key, group in tp.groupby([*SETTING, "flow"], dropna=False):
        lines.append(dict(zip([*SETTING, "flow"], key, strict=True)) | _sides(group, AROUND))
    return pd.DataFrame(lines)


def _sides(group: pd.DataFrame, names: Sequence[str]) -> dict[str, float]:
    means = {
        f"{side} {name}": float(group[group.backend == side][name].astype(float).mean())
        for side in SIDES
        for name in names
    }
    real = group[group.backend == "harness"].layer_ms.astype(float)
    return means | {"spread_pct": 100 * float((real.max() - real.min()) / real.mean()) if len(real) > 1 else math.nan}


def document(rows: pd.DataFrame, command: str) -> str:
    """The Markdown page. UserError where the rows hold no curve."""
    found, beside = curves(rows), around(rows)
    if found.empty:
        raise UserError(
            "no rows of flow=dp; run semmoe simulate -m experiment=micro (and semmoe measure -m experiment=micro)"
        )
    lines = ["# Micro-benchmark: time against the local activation rate", "", f"Made by `{command}`.", ""]
    lines += ["All-to-all: dispatch + combine. Each cell: simulated / measured, in milliseconds of one MoE layer.", ""]
    for key, part in found.groupby(SETTING, dropna=False):
        lines += [f"## {', '.join(f'{n} {v}' for n, v in zip(SETTING, key, strict=True))}", ""]
        lines += [
            "| dispatcher | LAR | all-to-all | experts | layer | spread % | layer gain over lowest LAR % |",
            "|" + " --- |" * 7,
        ]
        for _, group in part.groupby("dispatcher"):
            first = group.iloc[0]
            for _, x in group.iterrows():
                gains = [100 * (1 - x[f"{s} layer_ms"] / first[f"{s} layer_ms"]) for s in SIDES]
                cells = [_pair(*(x[f"{s} {name}"] for s in SIDES)) for name in CURVE]
                told = f"{x.spread_pct:.0f}" if not math.isnan(x.spread_pct) else "-"
                lines.append(
                    f"| {x.dispatcher} | {x.lar:.3f} | {' | '.join(cells)} | {told} | {_pair(gains[0], gains[1], digits=1)} |"
                )
        same = beside[(beside[SETTING].astype(str) == [str(v) for v in key]).all(axis=1)] if len(beside) else beside
        if len(same):
            lines += [
                "",
                "Attention-TP, mean over the rates (simulated: SRS and SAG pay for unequal homes, not for the shuffle):",
            ]
            lines += ["", "| flow | planning | reduce-scatter or SRS | all-gather or SAG | layer |", "|" + " --- |" * 5]
            lines += [
                f"| {x.flow} | {' | '.join(_pair(*(x[f'{s} {name}'] for s in SIDES)) for name in AROUND)} |"
                for _, x in same.iterrows()
            ]
            lines += _overhead(same)
        lines.append("")
    return "\n".join(lines)


def _overhead(same: pd.DataFrame) -> list[str]:
    """SRS + SAG over reduce-scatter + all-gather of the same rows, where both are there."""
    by_flow = same.set_index("flow")
    if not {"tp_scattered", "tp_shuffled"} <= set(by_flow.index):
        return []
    ratios = []
    for side in SIDES:
        moved = by_flow[[f"{side} srs_ms", f"{side} sag_ms"]].astype(float).sum(axis=1, skipna=False)
        ratios.append(100 * (float(moved["tp_shuffled"]) / float(moved["tp_scattered"]) - 1))
    return [
        "",
        f"SRS + SAG over reduce-scatter + all-gather: {_pair(ratios[0], ratios[1], digits=1)} % more (simulated / measured).",
    ]


def _pair(simulated: float, measured: float, digits: int = 3) -> str:
    return " / ".join("-" if math.isnan(x) else f"{x:.{digits}f}" for x in (simulated, measured))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page."""
    return write_page("micro", __doc__ or "", lambda runs, command: (document(read_rows(runs), command), ()), argv)


if __name__ == "__main__":
    sys.exit(main())
