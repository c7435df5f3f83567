"""Compare: simulated and measured rows joined by config id, summarised in figures and in words.

Three localities stand side by side and are never mixed: planned (from the training part), replayed (held-out routes in the
simulator) and measured (counted in the harness). Replayed equal to measured checks the plumbing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import UserError
from .results import OPS, SERVED, read_rows

LOCALITY = ("lar", "fan_out", "bytes_per_token")
COUNTED = ("imbalance_step", "imbalance_total", "home_imbalance", "active_experts", "node_bytes", "nic_bytes",
           "metadata_bytes", *(f"{op}_bytes" for op in OPS))  # fmt: skip
PREDICTED = ("layer", "step", *SERVED)
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
TIE = 1e-9


@dataclass(frozen=True, eq=False)
class Comparison:
    """One line of `table` per configuration; `rows` are the rows that it came from, `summary` the figures over all."""

    table: pd.DataFrame
    rows: pd.DataFrame
    summary: dict[str, Any]

    def to_csv(self, path: str | Path) -> None:
        """Write the joined table; UserError when it cannot be written."""
        try:
            self.table.to_csv(path, index=False)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None

    def render(self) -> str:
        """The comparison as text for a terminal."""
        return "\n\n".join([_shared_line(self.rows), _text_table(self.table), *summary_lines(self)])


def compare(folders: Iterable[str | Path]) -> Comparison:
    """Join the rows of these run folders. A side that is missing stays visible as such.

    Where a configuration has both a free-running and a replayed simulation, locality and latencies come from the replayed
    one (the same steps as measured), serving figures from the free-running one. UserError when there are no rows.
    """
    rows = read_rows(folders)
    lines = [_line(group) for _, group in rows.groupby(["config_id", "cluster"], sort=False)]
    table = pd.DataFrame(lines).sort_values([*POLICIES, *SHARED], kind="stable", ignore_index=True)
    varying = [name for name in (*POLICIES, *SHARED) if table[name].nunique(dropna=False) > 1 or name == "flow"]
    table.insert(0, "configuration", [_name(line, varying) for _, line in table.iterrows()])
    table["verdict"] = verdicts(table)
    return Comparison(table, rows, summarise(table))


def _line(group: pd.DataFrame) -> dict[str, Any]:
    """One configuration: its axes, three localities, predicted and measured times."""
    simulated, measured = group[group.backend == "simulator"], group[group.backend == "harness"]
    replayed = simulated[simulated.steps_file.notna()]
    free, simulated = simulated[simulated.steps_file.isna()], replayed if len(replayed) else simulated
    first = group.iloc[0]
    line: dict[str, Any] = {name: first[name] for name in ("config_id", *POLICIES, *SHARED)}
    line["sides"] = (
        "both" if len(simulated) and len(measured) else "simulated only" if len(simulated) else "measured only"
    )
    for name in LOCALITY:
        line[f"{name}_planned"] = _mean(group, f"{name}_planned")
        line[f"{name}_replayed"] = _mean(simulated, f"{name}_replayed")
        line[f"{name}_measured"] = _mean(measured, f"{name}_measured")
    best = measured if len(measured) else simulated
    for name in COUNTED[:4]:
        line[name] = _mean(best, name)
    line["replay_equal"] = _replay_equal(simulated, measured)
    for name in PREDICTED:
        predicted, real = _mean(free if name in SERVED else simulated, f"{name}_ms"), _mean(measured, f"{name}_ms")
        line[f"{name}_ms_predicted"], line[f"{name}_ms_measured"] = predicted, real
        line[f"{name}_error_pct"] = 100 * (predicted / real - 1) if real and real > 0 else math.nan
        repeats = measured[f"{name}_ms"].dropna().astype(float)
        spread = 100 * (repeats.max() - repeats.min()) / repeats.mean() if len(repeats) > 1 else math.nan
        line[f"{name}_spread_pct"] = spread
    line["layer_ms_low"], line["layer_ms_high"] = interval(measured)
    line["repeats"] = len(measured)
    return line


def interval(measured: pd.DataFrame) -> tuple[float, float]:
    """Interval of layer_ms over repeats: all of them, widened by each repeat's own bootstrap interval."""
    if measured.empty:
        return math.nan, math.nan
    low = measured["layer_ms_ci_low"].fillna(measured["layer_ms"]).astype(float)
    high = measured["layer_ms_ci_high"].fillna(measured["layer_ms"]).astype(float)
    return float(low.min()), float(high.max())


def _replay_equal(simulated: pd.DataFrame, measured: pd.DataFrame) -> str:
    """ "yes" / "no" where both executed the same steps, "other steps" where a served run formed its own batches."""
    if simulated.empty or measured.empty:
        return "-"
    if (set(measured.steps) | set(simulated.steps)) != {simulated.iloc[0].steps}:
        return "other steps"
    values = pd.concat([simulated, measured])
    for name in (*COUNTED, "tokens", "lar_per_layer", "fan_out_per_layer"):
        column = values[name].dropna()
        if len(column) not in (0, len(values)) or (len(column) and not (column == column.iloc[0]).all()):
            return f"no ({name})"
    return "yes"


def _mean(rows: pd.DataFrame, name: str) -> float:
    values = rows[name].dropna().astype(float)
    return float(values.mean()) if len(values) else math.nan


def _name(line: pd.Series[Any], varying: list[str]) -> str:
    words = [str(line["flow"])]
    words += [_plain(line[name]) for name in varying if name != "flow" and line[name] not in ("-", None)]
    return " / ".join(words)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """Errors, their size beside the spread of repeats, planned against measured, and the order of policies."""
    both = table[table.sides == "both"]
    summary: dict[str, Any] = {"configurations": len(table), "both": len(both)}
    for name in PREDICTED:
        errors = both[f"{name}_error_pct"].abs().dropna()
        if len(errors):
            summary[name] = {
                "median_error_pct": float(errors.median()), "p90_error_pct": float(errors.quantile(0.9)),
                "median_spread_pct": float(both[f"{name}_spread_pct"].median()), "count": len(errors),
            }  # fmt: skip
    gap = (table["lar_planned"] - table["lar_measured"].fillna(table["lar_replayed"])).abs().dropna() * 100
    if len(gap):
        summary["lar_gap_points"] = {"median": float(gap.median()), "max": float(gap.max())}
    checked = both["replay_equal"]
    summary["replay_equal"] = {"yes": int((checked == "yes").sum()), "no": int(checked.str.startswith("no").sum()),
                               "other_steps": int((checked == "other steps").sum())}  # fmt: skip
    summary["order"] = order(both)
    return summary


def order(both: pd.DataFrame) -> dict[str, int]:
    """Pairs within one flow and dispatcher: same order in both backends, opposite, or undecided (intervals overlap)."""
    counts = {"same": 0, "opposite": 0, "undecided": 0}
    for _, group in both.groupby(["flow", "dispatcher"]):
        for (_, a), (_, b) in itertools.combinations(group.iterrows(), 2):
            if a.layer_ms_low <= b.layer_ms_high and b.layer_ms_low <= a.layer_ms_high:
                counts["undecided"] += 1
            else:
                predicted = a.layer_ms_predicted - b.layer_ms_predicted
                agree = predicted * (a.layer_ms_measured - b.layer_ms_measured) > 0
                counts["same" if agree else "opposite"] += 1
    return counts


BASELINE = {
    "placement": "contiguous",
    "request_scheduler": ("round_robin", "-"),
    "token_scheduler": ("no_shuffle", "-"),
}


def is_baseline(line: pd.Series[Any]) -> bool:
    """No policy at all: contiguous experts, requests in turn, tokens in order."""
    return line.placement == "contiguous" and all(
        line[k] in BASELINE[k] for k in ("request_scheduler", "token_scheduler")
    )


def verdicts(table: pd.DataFrame) -> list[str]:
    """A sentence per configuration against the better of its honest baselines (same flow's, and tp_replicated)."""
    said = []
    for index, line in table.iterrows():
        rivals = [other for i, other in table.iterrows() if i != index and is_baseline(other)
                  and (line.flow == other.flow or (line.flow.startswith("tp_") and other.flow == "tp_replicated"))
                  and all(_same(line[k], other[k]) for k in SHARED)]  # fmt: skip
        said.append("baseline" if is_baseline(line) else _verdict(line, rivals))
    return said


def _same(a: Any, b: Any) -> bool:
    return a == b or (pd.isna(a) and pd.isna(b))


def _verdict(line: pd.Series[Any], rivals: list[pd.Series[Any]]) -> str:
    side = "measured" if not math.isnan(line.layer_ms_measured) else "predicted"
    known = [r for r in rivals if not math.isnan(r[f"layer_ms_{side}"])]
    if not known or math.isnan(line[f"layer_ms_{side}"]):
        return "no baseline to compare with"
    best = min(known, key=lambda r: r[f"layer_ms_{side}"])
    gain = 100 * (1 - line[f"layer_ms_{side}"] / best[f"layer_ms_{side}"])
    name = f"{best.flow} {best.placement}"
    if side == "predicted":
        word = "faster" if gain > 0 else "slower"
        return (
            f"{abs(gain):.0f} % {word} than {name} (predicted)"
            if abs(gain) >= 1
            else f"no gain over {name} (predicted)"
        )
    low = 100 * (1 - line.layer_ms_high / best.layer_ms_low)
    high = 100 * (1 - line.layer_ms_low / best.layer_ms_high)
    if low <= 0 <= high:
        return f"no gain here: {gain:+.0f} % [{low:+.0f}, {high:+.0f}] against {name} is within the spread"
    word = "faster" if gain > 0 else "slower"
    ends = sorted((abs(low), abs(high)))
    return f"{abs(gain):.0f} % {word} than {name} [{ends[0]:.0f}, {ends[1]:.0f}]"


def _shared_line(rows: pd.DataFrame) -> str:
    """What all rows have in common."""
    same = {name: rows[name].iloc[0] for name in ("model", "cluster", "ep_size", "workload", "batch_tokens", "dtype", "scope")
            if rows[name].nunique(dropna=False) == 1 and not pd.isna(rows[name].iloc[0])}  # fmt: skip
    return "all configurations: " + ", ".join(f"{name} {_plain(value)}" for name, value in same.items())


def _text_table(table: pd.DataFrame) -> str:
    width = min(max(map(len, table.configuration)), 62)
    head = (f"{'configuration':{width}s}  {'LAR pl/rep/meas':>17s} {'fan-out pl/rep/me':>17s} {'KB/token p/r/m':>16s} "
            f"{'equal':>5s} {'imbal':>5s}  {'layer ms pred/meas':>18s} {'error':>6s} {'spread':>6s}")  # fmt: skip
    lines = [head, "-" * len(head)]
    for _, line in table.iterrows():
        name = line.configuration if len(line.configuration) <= width else line.configuration[: width - 1] + "~"
        kb = "/".join(_number(line[f"bytes_per_token_{w}"] / 1e3, 1) for w in ("planned", "replayed", "measured"))
        lines.append(
            f"{name:{width}s}  {_three(line, 'lar', 3):>17s} {_three(line, 'fan_out', 2):>17s} {kb:>16s} "
            f"{line.replay_equal[:5]:>5s} {_number(line.imbalance_total, 2):>5s}  "
            f"{_number(line.layer_ms_predicted, 3):>8s} /{_number(line.layer_ms_measured, 3):>8s} "
            f"{_number(line.layer_error_pct, 0, '%'):>6s} {_number(line.layer_spread_pct, 0, '%'):>6s}"
        )
        if not math.isnan(line.tpot_ms_measured) or not math.isnan(line.tpot_ms_predicted):
            served = "   ".join(
                f"{n.upper()} {_number(line[f'{n}_ms_predicted'], 1)} / {_number(line[f'{n}_ms_measured'], 1)} ms"
                for n in ("ttft", "tpot", "e2e"))  # fmt: skip
            lines.append(f"    served, predicted / measured: {served}")
    return "\n".join(lines)


def _three(line: pd.Series[Any], name: str, digits: int) -> str:
    return "/".join(
        _number(line[f"{name}_{when}"], digits).removeprefix("0") for when in ("planned", "replayed", "measured")
    )


def _number(value: float, digits: int, unit: str = "") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}{unit}"


def summary_lines(comparison: Comparison) -> list[str]:
    """The summary in sentences."""
    summary, table = comparison.summary, comparison.table
    lines = []
    equal = summary["replay_equal"]
    if summary["both"]:
        text = f"Traffic replayed in simulation equals what was counted in {equal['yes']} of {summary['both']} configurations"
        text += f"; {equal['other_steps']} formed other steps (use replay=)" if equal["other_steps"] else ""
        lines.append(text + ("." if not equal["no"] else f"; {equal['no']} DIFFER: {', '.join(_differing(table))}."))
    if "lar_gap_points" in summary:
        gap = summary["lar_gap_points"]
        lines.append(f"Planned LAR is off by {gap['median']:.1f} points in the median, {gap['max']:.1f} at most.")
    for name in PREDICTED:
        if name in summary:
            s = summary[name]
            spread = f" (spread of the repeats {s['median_spread_pct']:.0f} %)" if s["median_spread_pct"] > 0 else ""
            lines.append(f"{name} time: median absolute error {s['median_error_pct']:.1f} %, p90 {s['p90_error_pct']:.1f} %"
                         f" over {s['count']} configurations{spread}.")  # fmt: skip
    pairs = summary["order"]
    if sum(pairs.values()):
        lines.append(f"Order of configurations within a flow: {pairs['same']} pairs agree, {pairs['opposite']} disagree, "
                     f"{pairs['undecided']} undecided (measured intervals overlap).")  # fmt: skip
    return ["\n".join(lines), "\n".join(f"{line.configuration}: {line.verdict}" for _, line in table.iterrows())]


def _differing(table: pd.DataFrame) -> list[str]:
    return [str(line.configuration) for _, line in table.iterrows() if line.replay_equal.startswith("no")]
