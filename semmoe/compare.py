"""Compare: simulated and measured rows joined by config id, summarised in figures and in words.

Three localities stand side by side and are never mixed: planned (from the training part), replayed (held-out routes in the
simulator) and measured (counted in the harness). Replayed equal to measured checks the plumbing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .axes import PATHS, POLICIES, SHARED, flat_axes, telling_axes, unjoined
from .files import write_atomically
from .repeats import mean_difference
from .results import OPS, SERVED, WAITS
from .row_files import read_rows
from .verdict import order, verdicts

LOCALITY = ("lar", "fan_out", "bytes_per_token")
SHOWN_COUNTS = ("imbalance_step", "imbalance_total", "home_imbalance", "active_experts")
COUNTED = (*SHOWN_COUNTS, "node_bytes", "nic_bytes", "metadata_bytes", *(f"{op}_bytes" for op in OPS))
PREDICTED = ("layer", "attention", "step", *SERVED)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One line of `table` per configuration; `rows` are the rows that it came from, `summary` the figures over all.

    axes: columns of `table` that tell the configurations apart. `table.key` joins a line to its rows (`rows.key`; a simulated
    row stands beside every transport that measured its configuration).
    """

    table: pd.DataFrame
    rows: pd.DataFrame
    summary: dict[str, Any]
    axes: tuple[str, ...] = ()

    def to_csv(self, path: str | Path) -> None:
        """Write the joined table, whole or not at all; UserError when it cannot be written."""
        write_atomically(path, self.table.drop(columns="key").to_csv(index=False))

    def render(self, width: int = 140) -> str:
        """The comparison as text for a terminal of `width` columns."""
        from .report.terminal import render

        return render(self, width)


def compare(folders: Iterable[str | Path]) -> Comparison:
    """Join the rows of these run folders. A side that is missing stays visible as such.

    Where a configuration has both a free-running and a replayed simulation, locality and latencies come from the replayed
    one (the same steps as measured), serving figures from the free-running one. UserError when there are no rows, or when
    both backends are there and no configuration has both (it names the axis that differs).
    """
    folders = list(folders)
    rows = read_rows(folders).drop_duplicates(ignore_index=True)  # a folder that is named twice counts once
    rows = rows.assign(launch=[_launch(told) for told in rows.cuda_graph], caches=[_caches(mb) for mb in rows.flush_mb])
    groups = _groups(rows)
    lines = [_line(key, group) for key, group in groups.items()]
    if rows.backend.nunique() > 1 and not any(line["sides"] == "both" for line in lines):
        raise unjoined(rows, folders)
    axes_of = {key: flat_axes(group.iloc[0]) for key, group in groups.items()}
    table = pd.DataFrame(lines)
    extra = telling_axes(table, axes_of)
    for name in extra:
        table[name] = [axes_of[key].get(name) for key in table.key]
    table = table.sort_values([*POLICIES, *SHARED, *PATHS], kind="stable", ignore_index=True)
    named = [n for n in (*POLICIES, *SHARED) if n == "flow" or table[n].nunique(dropna=False) > 1]
    axes = (*named, *(n for n in PATHS if len(set(table[n]) - {"-"}) > 1), *extra)
    table.insert(0, "configuration", [_name(line, axes) for _, line in table.iterrows()])
    table = pd.concat([table, verdicts(table, groups)], axis=1)
    keyed = pd.concat([group.assign(key=key) for key, group in groups.items()], ignore_index=True)
    return Comparison(table, keyed, summarise(table, groups), axes)


def _launch(cuda_graph: Any) -> str:
    """Of a measured row: replayed from a graph, or kernel by kernel from the host."""
    return "graph" if cuda_graph == "on" else "eager"


def _caches(flush_mb: Any) -> str:
    """Of a measured row: as the layer before left them, or flushed."""
    return "warm" if pd.isna(flush_mb) or not flush_mb else f"cold, {flush_mb:g} MB flushed"


def _groups(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each line of the table: a configuration on a cluster, and one line for each way it was measured.

    The simulator does not know the transport (it is no axis): its rows stand beside every transport's.
    """
    groups = {}
    for (config, cluster), group in rows.groupby(["config_id", "cluster"], sort=False):
        measured = group[group.backend == "harness"]
        if measured.empty:
            groups[f"{config}@{cluster}"] = group
        for path, same in measured.groupby(list(PATHS), sort=False):
            groups["@".join(map(str, (config, cluster, *path)))] = pd.concat([group[group.backend != "harness"], same])
    return groups


def _line(key: str, group: pd.DataFrame) -> dict[str, Any]:
    """One configuration: its axes, three localities, predicted and measured times."""
    simulated, measured = group[group.backend == "simulator"], group[group.backend == "harness"]
    replayed = simulated[simulated.steps_file.notna()]
    free, simulated = simulated[simulated.steps_file.isna()], replayed if len(replayed) else simulated
    first = group.iloc[0]
    sides = "both" if len(simulated) and len(measured) else "simulated only" if len(simulated) else "measured only"
    line: dict[str, Any] = {"key": key, "config_id": first.config_id, "sides": sides}
    line |= {name: first[name] for name in (*POLICIES, *SHARED)}
    line |= {name: measured.iloc[0][name] if len(measured) else "-" for name in PATHS}
    same = _same_steps(simulated, measured)
    counted = same if len(same) else measured
    for name in LOCALITY:
        line[f"{name}_planned"] = _mean(group, f"{name}_planned")
        line[f"{name}_replayed"] = _mean(simulated, f"{name}_replayed")
        line[f"{name}_measured"] = _mean(counted, f"{name}_measured")
    for name in SHOWN_COUNTS:
        line[name] = _mean(counted if len(counted) else simulated, name)
    line["replay_equal"] = _replay_equal(simulated, measured, same)
    for name in PREDICTED:
        predicted, real = _mean(free if name in SERVED else simulated, f"{name}_ms"), _mean(measured, f"{name}_ms")
        line[f"{name}_ms_predicted"], line[f"{name}_ms_measured"] = predicted, real
        line[f"{name}_error_pct"] = 100 * (predicted / real - 1) if real and real > 0 else math.nan
        repeats = measured[f"{name}_ms"].dropna().astype(float)
        line[f"{name}_spread_pct"] = 100 * mean_difference(repeats) / repeats.mean()
    for name in WAITS:
        for side, of in (("predicted", simulated), ("measured", measured)):
            line[f"{name}_ms_{side}"] = _mean(of, f"{name}_ms")
    line["layer_ms_low"], line["layer_ms_high"] = interval(measured)
    line["repeats"] = len(measured)
    line["calibrations"] = group.cluster_digest.nunique()
    return line


def interval(measured: pd.DataFrame) -> tuple[float, float]:
    """Interval of layer_ms over repeats: all of them, widened by each repeat's own bootstrap interval.

    NaN where there is nothing to tell the noise from: one repeat without an interval of its own, or of one step.
    """
    known = measured[measured["layer_ms"].notna()]
    if known.empty or (len(known) == 1 and known["layer_ms_ci_low"].isna().all()):
        return math.nan, math.nan
    low = known["layer_ms_ci_low"].astype(float).fillna(known["layer_ms"].astype(float))
    high = known["layer_ms_ci_high"].astype(float).fillna(known["layer_ms"].astype(float))
    if len(known) == 1 and float(low.min()) == float(high.max()):  # one step: its bootstrap knows no spread
        return math.nan, math.nan
    return float(low.min()), float(high.max())


def _same_steps(simulated: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """The measured rows that executed the steps that were simulated: all of fixed batches, the logged ones of a replay."""
    if simulated.empty or (measured.workload == "batches").all():
        return measured
    return measured[measured.steps_file.notna() & measured.steps_file.isin(simulated.steps_file)]


def _replay_equal(simulated: pd.DataFrame, measured: pd.DataFrame, same: pd.DataFrame) -> str:
    """ "yes" / "no (column)" where both executed the same steps, "other steps" where a served run formed its own batches.

    Equal means equal: tokens, steps, every byte counter, LAR and fan-out of every layer, to the last row.
    """
    if simulated.empty or measured.empty:
        return "-"
    if same.empty:
        return "other steps"
    pairs = {name: name for name in ("tokens", "steps", *COUNTED, "lar_per_layer", "fan_out_per_layer")}
    pairs |= {f"{name}_replayed": f"{name}_measured" for name in LOCALITY}
    ours = simulated[["steps_file", *pairs]].to_dict("records")
    for row in same[["workload", "steps_file", *pairs.values()]].to_dict("records"):
        for twin in ours:
            if row["workload"] != "batches" and twin["steps_file"] != row["steps_file"]:
                continue
            for a, b in pairs.items():
                if not (twin[a] == row[b] or (pd.isna(twin[a]) and pd.isna(row[b]))):
                    return f"no ({b.removesuffix('_measured')})"
    return "yes"


def _mean(rows: pd.DataFrame, name: str) -> float:
    values = rows[name].dropna().astype(float)
    return float(values.mean()) if len(values) else math.nan


def _name(line: pd.Series[Any], axes: Sequence[str]) -> str:
    """The axes that tell a configuration apart, in a line: flow / dispatcher / ... / other.axis=value."""
    words = []
    for name in axes:
        value = line[name]
        if value is None or value == "-" or (isinstance(value, float) and math.isnan(value)):
            continue
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(text if name in (*POLICIES, *PATHS) else f"{name}={text}")
    return " / ".join(words)


def summarise(table: pd.DataFrame, groups: dict[Any, pd.DataFrame]) -> dict[str, Any]:
    """Errors, their size beside the spread of repeats, planned against measured, and the order of policies.

    within: configurations whose error is at most 20 %, or twice the spread of their own repeats where that is larger.
    """
    both = table[table.sides == "both"]
    summary: dict[str, Any] = {"configurations": len(table), "both": len(both)}
    for name in PREDICTED:
        known = both[both[f"{name}_error_pct"].notna()]
        if len(known):
            errors, spread = known[f"{name}_error_pct"].abs(), known[f"{name}_spread_pct"]
            allowed = (2 * spread).clip(lower=20).fillna(20)
            summary[name] = {
                "median_error_pct": float(errors.median()), "p90_error_pct": float(errors.quantile(0.9)),
                "median_spread_pct": float(spread.median()), "within": int((errors <= allowed).sum()), "count": len(known),
            }  # fmt: skip
    for name in WAITS:
        known = table[table[f"{name}_ms_measured"].notna() & table.layer_ms_measured.gt(0)]
        if len(known):
            summary[f"{name}_share"] = {
                side: float((known[f"{name}_ms_{side}"] / known[f"layer_ms_{side}"]).mean())
                for side in ("predicted", "measured")
            }
    for against in ("measured", "replayed"):
        gap = (table.lar_planned - table[f"lar_{against}"]).abs().dropna() * 100
        if len(gap):
            summary["lar_gap_points"] = {"against": against, "median": float(gap.median()), "max": float(gap.max())}
            break
    checked = both["replay_equal"]
    summary["replay_equal"] = {"yes": int((checked == "yes").sum()), "no": int(checked.str.startswith("no").sum()),
                               "other_steps": int((checked == "other steps").sum())}  # fmt: skip
    summary["order"] = order(both, groups, across_flows=False)
    summary["order_across_flows"] = order(both, groups, across_flows=True)
    summary["other_calibration"] = int((both.calibrations > 1).sum())
    return summary
