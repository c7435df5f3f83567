"""The paper's micro-benchmark as a page: all-to-all and layer time against the local activation rate.

    semmoe simulate -m experiment=micro; semmoe measure -m experiment=micro
    python -m semmoe.micro results/runs/micro --out results/micro.md

The routes have a dial (`trace.local_rate`); the page shows the LAR that was replayed or counted, not the dial. Beside the curve
stands what it is made of: bytes, phases, waiting, and a line through the times over the bytes, which says how much of an
exchange is there without a byte. `token_ranking.jsonl` in a run's folder (harness/bench/ranking.py) is shown too.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .errors import UserError
from .page_command import write_page
from .repeats import mean_difference
from .row_files import read_rows

SIDES = ("simulator", "harness")
CURVE = ("all_to_all_ms", "experts_ms", "layer_ms")
PHASES = ("gate_ms", "permute_ms", "dispatch_ms", "combine_ms", "experts_ms", "other_ms", "wait_ms", "core_wait_ms")
AROUND = ("plan_ms", "srs_ms", "sag_ms", "layer_ms")
SETTING = ["cluster", "model", "ep_size", "dtype", "batch_tokens"]


def curves(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per configuration of flow dp, by rising LAR: all-to-all (dispatch + combine), experts and layer, mean over
    repeats, columns "simulator layer_ms", "harness layer_ms", ..., and the spread of measured repeats in per cent."""
    dp = rows[rows.flow == "dp"].copy()
    dp["all_to_all_ms"] = dp.dispatch_ms.fillna(0.0).astype(float) + dp.combine_ms.fillna(0.0).astype(float)
    dp["lar"] = dp.lar_replayed.fillna(dp.lar_measured).astype(float)
    layers = dp.steps.astype(float) * dp.lar_per_layer.map(lambda told: len(json.loads(told)))
    dp["megabytes"] = (
        (dp.dispatch_bytes.fillna(0.0).astype(float) + dp.combine_bytes.fillna(0.0).astype(float)) / layers / 1e6
    )
    lines = []
    for key, group in dp.groupby([*SETTING, "dispatcher", "config_id"], dropna=False):
        line = dict(zip([*SETTING, "dispatcher", "config_id"], key, strict=True)) | {"lar": group.lar.mean()}
        line |= {"megabytes": float(group.megabytes.mean())}
        lines.append(line | _sides(group, (*CURVE, *PHASES)))
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
    return means | {"spread_pct": 100 * mean_difference(real) / float(real.mean())}


def document(rows: pd.DataFrame, command: str, runs: Sequence[Path] = ()) -> str:
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
        lines += made_of(part)
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
    return "\n".join([*lines, *token_ranking(runs)])


def made_of(part: pd.DataFrame) -> list[str]:
    """Phases at the lowest and the highest LAR of every dispatcher, and the line through all-to-all time over bytes."""
    text = [
        "",
        "What a layer is made of at both ends (waiting: mean over ranks, beside the phases, measured only):",
        "",
    ]
    names = [name.removesuffix("_ms").replace("_", " ") for name in PHASES]
    text += [f"| dispatcher | LAR | MB, both ways | {' | '.join(names)} |", "|" + " --- |" * (3 + len(names))]
    said = []
    for dispatcher, group in part.groupby("dispatcher"):
        for _, x in group.iloc[[0, -1]].iterrows():
            cells = [_pair(x[f"simulator {name}"], x[f"harness {name}"], digits=3) for name in PHASES]
            text.append(f"| {dispatcher} | {x.lar:.3f} | {x.megabytes:.2f} | {' | '.join(cells)} |")
        said += [_line_over_bytes(str(dispatcher), group, side) for side in SIDES]
    return [*text, "", *(sentence for sentence in said if sentence)]


def _line_over_bytes(dispatcher: str, group: pd.DataFrame, side: str) -> str:
    """What a straight line through the times of one curve says, in a sentence; nothing of fewer than three points."""
    known = group[group[f"{side} all_to_all_ms"].notna()]
    if len(known) < 3:
        return ""
    slope, fixed = np.polyfit(known.megabytes, known[f"{side} all_to_all_ms"], 1)
    saved_mb = float(known.megabytes.iloc[0] - known.megabytes.iloc[-1])
    text = (
        f"- {dispatcher}, {side}: all-to-all = {fixed:.3g} ms + {slope * 1e3:,.1f} us a MB; from the lowest LAR to the highest "
        f"{saved_mb:.2f} MB fewer, worth {slope * saved_mb:.3g} ms of {known[f'{side} all_to_all_ms'].iloc[0]:.3g}."
    )
    if side == "simulator" or known.spread_pct.isna().all():
        return text
    noise_ms = float((known.spread_pct / 100 * known[f"{side} layer_ms"]).median())
    if abs(slope * saved_mb) < noise_ms:
        text += (
            f" Repeats of one configuration differ by {noise_ms:.2f} ms in the median: the curve is flat because its bytes "
            "are worth less than that, and the rest of the exchange is there without them."
        )
    return text


def token_ranking(runs: Sequence[Path]) -> list[str]:
    """Table of the ranking of tokens by rank, where the runs hold its rows."""
    files = [run / "token_ranking.jsonl" for run in runs if (run / "token_ranking.jsonl").is_file()]
    if not files:
        return []
    rows = pd.DataFrame([json.loads(line) for file in files for line in file.read_text().splitlines()])
    if not rows.correct.all():
        raise UserError(f"{files[0]}: rankings differ, so there is no ratio; see python -m harness.bench.ranking")
    text = ["## Token ranking", ""]
    text += [
        "Stable order, places and counts of tokens by home rank on a CPU core: one counting pass against torch's argsort,",
        "bincount, cumsum, inverse; medians in us, mean over repeats of the whole run. On GPUs: `make bench-gpu`.",
        "",
        "| tokens | ranks | one pass | sort pipeline | ratio | repeats spread % |",
        "|" + " --- |" * 6,
    ]
    for (tokens, ranks), group in rows.groupby(["tokens", "ranks"]):
        ours, theirs = (group[group.variant == name] for name in ("one_pass", "sort_pipeline"))
        ours_us, theirs_us = float(ours.p50_us.mean()), float(theirs.p50_us.mean())
        cells = f"{ours_us:.1f} | {theirs_us:.1f} | {theirs_us / ours_us:.2f} | {100 * group.p50_spread.max():.0f}"
        text.append(f"| {tokens} | {ranks} | {cells} |")
    return [*text, ""]


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
    return write_page(
        "micro", __doc__ or "", lambda runs, command: (document(read_rows(runs), command, runs), ()), argv
    )


if __name__ == "__main__":
    sys.exit(main())
