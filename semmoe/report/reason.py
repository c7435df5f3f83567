"""Why a configuration is faster than its baseline, or is not: what moved in locality, in bytes and in each phase."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ..compare import Comparison

EXCHANGES = ("srs", "dispatch", "combine", "sag")
FOLLOWS = 0.4  # exchange time that falls by less than this part of its bytes' fall does not follow the bytes


def why(comparison: Comparison, line: Any, base: Any, side: str) -> str:
    """Sentences about `line` against its baseline, from the rows of one side ("measured" or "predicted")."""
    backend, counted = ("harness", "measured") if side == "measured" else ("simulator", "replayed")
    ours, theirs = (_phases(comparison.rows, which.key, backend) for which in (line, base))
    facts = [f"{name} {before:{form}} → {after:{form}}" for name, before, after, form in (
        ("LAR", base[f"lar_{counted}"], line[f"lar_{counted}"], ".2f"),
        ("fan-out", base[f"fan_out_{counted}"], line[f"fan_out_{counted}"], ".2f"),
        ("payload kB a token", base[f"bytes_per_token_{counted}"] / 1e3, line[f"bytes_per_token_{counted}"] / 1e3, ".3g"),
        ("busiest rank / mean", base.imbalance_step, line.imbalance_step, ".2f"),
        ("exchange ms", theirs["exchange"], ours["exchange"], ".3g"), ("experts ms", theirs["experts"], ours["experts"], ".3g"),
        ("planning ms", theirs["plan"], ours["plan"], ".3g"),
    ) if not (math.isnan(before) or math.isnan(after)) and (before or after)]  # fmt: skip
    text = "From the baseline to it: " + ", ".join(facts) + "." if facts else ""
    return " ".join([text, *_reasons(line, base, ours, theirs, counted)]).strip() or "No phase of it was recorded."


def _reasons(line: Any, base: Any, ours: dict[str, float], theirs: dict[str, float], counted: str) -> list[str]:
    """What holds a gain back, each where the figures say so."""
    told = []
    layer, exchange = theirs["layer"], theirs["exchange"]
    if line.dispatcher == "allgather_rs":
        told.append("allgather_rs sends every row to every rank: its bytes do not depend on the placement.")
    if layer > 0 and exchange >= 0:
        told.append(
            f"Exchange is {min(100, 100 * exchange / layer):.0f} % of the baseline's layer, the most that locality could save."
        )
    bytes_before, bytes_after = base[f"bytes_per_token_{counted}"], line[f"bytes_per_token_{counted}"]
    if bytes_before > 0 and exchange > 0:
        fewer, sooner = 1 - bytes_after / bytes_before, 1 - ours["exchange"] / exchange
        if fewer > 0.05 and sooner < FOLLOWS * fewer:
            moved = f"{'falls' if sooner > 0 else 'rises'} by {abs(100 * sooner):.0f} %"
            told.append(
                f"Bytes fall by {100 * fewer:.0f} %, exchange time {moved}: start-up and waiting, not bytes, set its time."
            )
    if line[f"lar_{counted}"] - base[f"lar_{counted}"] < 0.03:
        told.append("Locality hardly moved.")
    if line.imbalance_step > 1.05 * base.imbalance_step:
        told.append("The load is less even, and a layer waits for its busiest rank.")
    saved = theirs["exchange"] - ours["exchange"]
    if ours["plan"] - theirs["plan"] > 0.5 * max(saved, 0) > 0:
        told.append("Planning costs more than half of what the exchange saves.")
    return told


def _phases(rows: pd.DataFrame, key: str, backend: str) -> dict[str, float]:
    """Mean milliseconds of exchange, experts, planning (0 where the flow has none) and the layer; NaN: not recorded."""
    mine = rows[(rows.key == key) & (rows.backend == backend)]

    def total(names: tuple[str, ...]) -> float:
        values = [float(mine[f"{n}_ms"].astype(float).mean()) for n in names]
        known = [v for v in values if not math.isnan(v)]
        return sum(known) if known else math.nan

    parts = {"exchange": EXCHANGES, "experts": ("experts",), "layer": ("layer",)}
    plan = total(("plan",))
    return {name: total(names) for name, names in parts.items()} | {"plan": 0.0 if math.isnan(plan) else plan}
