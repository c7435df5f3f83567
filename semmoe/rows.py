"""Pieces of a result row that both backends share."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .traffic.locality import LocalityMeter

MOST_RANKS_IN_PAIRS = 64


def locality_columns(meter: LocalityMeter, suffix: str) -> dict[str, Any]:
    """Columns of a row from the Traffic that was counted; suffix "replayed" (simulator) or "measured" (harness)."""
    columns = meter.columns()
    payload = columns["node_bytes"] + columns["nic_bytes"]
    return {
        "tokens": meter.tokens,
        "steps": meter.steps,
        f"lar_{suffix}": columns.pop("lar"),
        f"fan_out_{suffix}": columns.pop("fan_out"),
        f"bytes_per_token_{suffix}": payload / meter.tokens if meter.tokens else None,
        "lar_per_layer": _json_list(meter.lar_per_layer_L()),
        "fan_out_per_layer": _json_list(meter.fan_out_per_layer_L()),
        "imbalance_per_layer": _json_list(meter.imbalance_per_layer_L()),
        "assignment_pairs": _json_pairs(meter.assignment_pairs_LGG),
        "rank_pairs": _json_pairs(meter.rank_pairs_LGG),
        **columns,
    }


def _json_list(values: NDArray[np.float64]) -> str:
    return json.dumps([None if np.isnan(v) else round(float(v), 6) for v in values])


def _json_pairs(pairs_LGG: NDArray[np.int64]) -> str | None:
    """Pairs over all layers; nothing where no token has a home, and for more ranks than a picture can show."""
    if pairs_LGG.shape[1] > MOST_RANKS_IN_PAIRS or not pairs_LGG.any():
        return None
    return json.dumps(pairs_LGG.sum(axis=0).tolist())


def label(group: dict[str, Any] | None) -> str:
    """Short name of a policy: a built-in's class in snake_case, the whole `_target_` of anybody else's."""
    target = str((group or {}).get("_target_") or "none")
    if not target.startswith("semmoe."):
        return target
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", target.rsplit(".", 1)[-1]).lower()


@functools.cache
def commit() -> str:
    """Short git commit of the working directory's checkout ('+' when changed); '' outside of one."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=9, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""
