"""Verdicts: does a configuration pay against the better of its honest baselines, in words and with an interval.

Repeats of one number run close in time (a sweep interleaves its configurations), so they are compared in pairs: the gain's
95 % interval is Student's t over the differences of log time. With one repeat, the bootstrap intervals of both rows stand in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .axes import PATHS, setting

PREDICTED_TIE_PCT = 1.0  # predictions closer than this are not told apart


@dataclass(frozen=True)
class Gain:
    """(baseline - ours) / baseline in percent, and its 95 % interval (NaN: nothing to tell the noise from)."""

    pct: float
    low_pct: float = math.nan
    high_pct: float = math.nan

    @property
    def known(self) -> bool:
        return not math.isnan(self.low_pct)

    @property
    def decided(self) -> bool:
        return self.known and not self.low_pct <= 0 <= self.high_pct


def gain(ours: pd.DataFrame, baseline: pd.DataFrame, metric: str, level: float = 0.95) -> Gain:
    """Gain of measured rows over a baseline's, on the mean of `metric` ("layer_ms", "e2e_ms"), repeats paired by number.

    level: what the interval holds (bootstrap intervals, where one repeat has nothing else, keep their 95 %).
    """
    a, b = (rows.dropna(subset=[metric]).groupby("repeat")[metric].mean().astype(float) for rows in (ours, baseline))
    both = a.index.intersection(b.index)
    if len(both) > 1:
        logs = np.log(a[both].to_numpy() / b[both].to_numpy())
        centre, half = (
            float(logs.mean()),
            _student(len(logs) - 1, level) * float(logs.std(ddof=1)) / math.sqrt(len(logs)),
        )
    else:
        centre = math.log(a.mean() / b.mean())
        half = math.hypot(_half_width(ours, metric), _half_width(baseline, metric))
    return Gain(*(100 * -math.expm1(x) for x in (centre, centre + half, centre - half)))


def _student(degrees: int, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def _half_width(rows: pd.DataFrame, metric: str) -> float:
    """Half the width, in log time, of the rows' own bootstrap interval; NaN where they have none."""
    if metric != "layer_ms":
        return math.nan
    low, high = rows["layer_ms_ci_low"].astype(float).mean(), rows["layer_ms_ci_high"].astype(float).mean()
    return math.log(high / low) / 2 if low > 0 else math.nan


def is_baseline(line: pd.Series[Any]) -> bool:
    """No policy at all: contiguous experts, requests in turn, tokens in order."""
    return bool(line.placement == "contiguous" and line.request_scheduler in ("round_robin", "-")
                and line.token_scheduler in ("no_shuffle", "-"))  # fmt: skip


def same_path(a: Any, b: Any) -> bool:
    """Whether both were measured alike: transport, kernels, graph or not, caches ("-": not measured)."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in PATHS]
    return all("-" in pair or pair[0] == pair[1] for pair in pairs)


def metric_of(line: pd.Series[Any]) -> str:
    """What a verdict is about: the layer's time in fixed batches, end-to-end time where requests were served.

    Served configurations form different batches, so their layer times are times of different work.
    """
    served = line.workload == "serve" and not (math.isnan(line.e2e_ms_measured) and math.isnan(line.e2e_ms_predicted))
    return "e2e" if served else "layer"


def verdicts(table: pd.DataFrame, groups: Mapping[Any, pd.DataFrame]) -> pd.DataFrame:
    """Columns verdict, baseline, gain_pct, gain_low_pct, gain_high_pct for each line of the table.

    Baselines: the same flow without policies (any dispatcher), and for attention-TP also tp_replicated, in the same setting.
    """
    settings = {key: setting(group.iloc[0]) for key, group in groups.items()}
    bases = [line for _, line in table.iterrows() if is_baseline(line)]
    said = []
    for _, line in table.iterrows():
        rivals = [b for b in bases if b.key != line.key and settings[b.key] == settings[line.key] and same_path(b, line)
                  and (b.flow == line.flow or (line.flow.startswith("tp_") and b.flow == "tp_replicated"))]  # fmt: skip
        said.append({"verdict": "baseline"} if is_baseline(line) else _verdict(line, rivals, groups))
    return pd.DataFrame(
        said, columns=["verdict", "baseline", "gain_pct", "gain_low_pct", "gain_high_pct"], index=table.index
    )


def _verdict(line: pd.Series[Any], rivals: list[pd.Series[Any]], groups: Mapping[Any, pd.DataFrame]) -> dict[str, Any]:
    metric = metric_of(line)
    for side in ("measured", "predicted"):
        column = f"{metric}_ms_{side}"
        known = [r for r in rivals if not math.isnan(r[column])]
        if known and not math.isnan(line[column]):
            break
    else:
        return {"verdict": "no baseline to compare with"}
    best = min(known, key=lambda r: r[column])
    name = _short(best, rivals)
    which = f"the better baseline ({name})" if len(known) > 1 else f"the baseline ({name})"
    what = " end to end" if metric == "e2e" else ""
    predicted = 100 * (1 - line[f"{metric}_ms_predicted"] / best[f"{metric}_ms_predicted"])
    if side == "predicted":
        words = "no gain here (predicted)" if abs(predicted) < PREDICTED_TIE_PCT else f"{_faster(predicted)}{what}"
        joint = "against" if abs(predicted) < PREDICTED_TIE_PCT else "than"
        text = f"{words} {joint} {which}, predicted and not measured"
        return {"verdict": text, "baseline": best.configuration, "gain_pct": predicted}
    found = gain(_measured(groups[line.key]), _measured(groups[best.key]), f"{metric}_ms")
    low, high = found.low_pct, found.high_pct
    if found.decided:
        ends = (low, high) if found.pct > 0 else (-high, -low)
        text = f"{_faster(found.pct)}{what} than {which}, 95 % interval {_pct(ends[0])} to {_pct(ends[1])} %"
    elif found.known:
        text = (f"no gain here: {_signed(found.pct)} %{what} against {which}, "
                f"95 % interval {_signed(low)} to {_signed(high)} % includes 0")  # fmt: skip
    else:
        text = f"undecided: {_signed(found.pct)} %{what} against {which}, one repeat gives no interval; measure with repeats=3"
    if not math.isnan(predicted):
        text += f" (predicted {_signed(predicted)} %)"
    return {
        "verdict": text,
        "baseline": best.configuration,
        "gain_pct": found.pct,
        "gain_low_pct": low,
        "gain_high_pct": high,
    }


def _measured(group: pd.DataFrame) -> pd.DataFrame:
    return group[group.backend == "harness"]


def _short(best: pd.Series[Any], rivals: list[pd.Series[Any]]) -> str:
    """Flow and placement of a baseline; its dispatcher too where the baselines differ in it."""
    several = len({r.dispatcher for r in rivals if r.flow == best.flow}) > 1
    return f"{best.flow} {best.dispatcher} {best.placement}" if several else f"{best.flow} {best.placement}"


def _faster(pct: float) -> str:
    return f"{_pct(abs(pct))} % {'faster' if pct > 0 else 'slower'}"


def _pct(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"


def _signed(value: float) -> str:
    return "below -999" if value < -999 else f"{round(value) or 0:+d}"  # no "-0"


@dataclass(frozen=True)
class Pair:
    """Two configurations (keys of the table) in both backends. predicted, measured: sign of a's mean layer time less
    b's; apart: whether their measured intervals do not overlap."""

    a: Any
    b: Any
    predicted: int
    measured: int
    apart: bool

    @property
    def verdict(self) -> str:
        """ "same" or "opposite" order where the measurement decides, else "undecided" (equal predictions too)."""
        agree = self.predicted * self.measured
        return "undecided" if not (self.apart and agree) else "same" if agree > 0 else "opposite"


def pairs(both: pd.DataFrame, groups: Mapping[Any, pd.DataFrame], across_flows: bool) -> list[Pair]:
    """Every two configurations of fixed batches in one setting and measured alike: within one flow and dispatcher, or
    between them (across_flows)."""
    lines = both.dropna(subset=["layer_ms_predicted", "layer_ms_measured"])
    lines = lines[lines.workload == "batches"]  # served runs form different batches
    settings = {key: setting(groups[key].iloc[0]) for key in lines.key}
    every: list[Any] = list(lines.itertuples())
    found = []
    for a, b in itertools.combinations(every, 2):
        elsewhere = (a.flow, a.dispatcher) != (b.flow, b.dispatcher)
        if settings[a.key] != settings[b.key] or elsewhere is not across_flows or not same_path(a, b):
            continue
        predicted = int(np.sign(a.layer_ms_predicted - b.layer_ms_predicted))
        real = int(np.sign(a.layer_ms_measured - b.layer_ms_measured))
        apart = a.layer_ms_low > b.layer_ms_high or b.layer_ms_low > a.layer_ms_high
        found.append(Pair(a.key, b.key, predicted, real, bool(apart)))
    return found


def order(both: pd.DataFrame, groups: Mapping[Any, pd.DataFrame], across_flows: bool) -> dict[str, Any]:
    """How many `pairs` agree in order, and Kendall's tau over the means of all pairs, decided or not (NaN: no pair)."""
    found = pairs(both, groups, across_flows)
    counts: dict[str, Any] = {v: sum(p.verdict == v for p in found) for v in ("same", "opposite", "undecided")}
    concordant = sum(p.predicted * p.measured for p in found)
    return counts | {"kendall_tau": concordant / len(found) if found else math.nan}
