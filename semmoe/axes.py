"""Axes of result rows: which of them tell configurations apart, which make two comparable, and why rows do not join."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import UserError

PATHS = ("transport", "kernel_path", "launch", "caches")  # how a line of a comparison was measured
POLICIES = ("flow", "dispatcher", "placement", "request_scheduler", "token_scheduler")
SHARED = (
    "model",
    "cluster",
    "ep_size",
    "workload",
    "rate_rps",
    "batch_tokens",
    "dtype",
    "scope",
    "seed",
    "trace_digest",
)
# what a policy may choose; everything else must be equal before two configurations are held against each other
CHOICES = {*POLICIES, "predictor", "replica_router", "home_cap", "dispatch_dtype", "combine_dtype"}


def flat_axes(row: Mapping[str, Any] | pd.Series[Any]) -> dict[str, Any]:
    """The swept axes of a row by dotted name: {"workload.composition": "shuffled", ...}; lists stay values as JSON."""
    try:
        axes = json.loads(row["axes"])
    except json.JSONDecodeError as error:
        raise UserError(f"row {row['config_id']} of run {row['run']}: column axes is not JSON ({error})") from None
    return flat(axes)


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested mappings by dotted name; lists stay values as JSON."""
    leaves: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            leaves[prefix] = json.dumps(value) if isinstance(value, list) else value

    visit("", tree)
    return leaves


def setting(row: Mapping[str, Any] | pd.Series[Any]) -> tuple[Any, ...]:
    """What two configurations must share to be held against each other: all axes but the choices of a policy."""
    fixed = {name: value for name, value in flat_axes(row).items() if name.split(".")[0] not in CHOICES}
    named = [None if pd.isna(row[name]) else row[name] for name in SHARED]
    return (*named, json.dumps(fixed, sort_keys=True))


def telling_axes(table: pd.DataFrame, axes_of: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Axes beyond the named columns that differ between configurations which the named columns do not tell apart."""
    known = [n for n in (*POLICIES, *SHARED) if table[n].nunique(dropna=False) > 1]
    labels = {
        key: tuple(map(str, line)) for key, line in zip(table.key, table[known].itertuples(index=False), strict=True)
    }
    told: list[str] = []
    for name in sorted({n for axes in axes_of.values() for n in axes} - set(table.columns)):
        values: dict[tuple[str, ...], set[str]] = {}
        for key, axes in axes_of.items():
            values.setdefault(labels[key], set()).add(repr(axes.get(name)))
        if any(len(different) > 1 for different in values.values()):
            told.append(name)
            labels = {key: (*label, repr(axes_of[key].get(name))) for key, label in labels.items()}
    return told


def unjoined(rows: pd.DataFrame, folders: Iterable[str | Path]) -> UserError:
    """The error for rows of both backends of which none share a configuration: names the axes of the nearest pair."""
    first = rows.drop_duplicates(["config_id", "cluster", "backend"])
    sides: dict[str, list[tuple[str, dict[str, Any]]]] = {"simulator": [], "harness": []}
    for _, line in first.iterrows():
        sides[line.backend].append((line.config_id, flat_axes(line) | {"cluster": line.cluster}))

    def differing(pair: Any) -> list[str]:
        (_, x), (_, y) = pair
        return [name for name in sorted({*x, *y}) if x.get(name) != y.get(name)]

    pair = min(itertools.product(*sides.values()), key=lambda pair: len(differing(pair)))
    (a, x), (b, y) = pair
    told = [f"{n}: {_value(x.get(n))} simulated, {_value(y.get(n))} measured" for n in differing(pair)]
    where = "; ".join(told[:6]) + (" and more" if len(told) > 6 else "") or "its config_id alone"
    return UserError(
        f"{', '.join(map(str, folders))}: {len(sides['simulator'])} simulated and {len(sides['harness'])} measured "
        f"configurations, none of which join; the nearest pair ({a} and {b}) differs in {where}. "
        "Simulate and measure with the same overrides"
    )


def _value(value: Any) -> str:
    return "none" if value is None else str(value)
