"""The verdict of a whole comparison in plain words: does it pay here, by how much, why, and how sure that is.

Settings (same model, cluster, batch, ...) are judged one by one: the best configuration with a policy against the better
baseline, measured where anything was measured. A gain counts when the 95 % interval over repeats lies above 0. Nothing is
decided by one repeat, which does not show how much runs differ, nor by repeats that differ so much that a gain of more
than HIDDEN_PCT could hide in the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..axes import POLICIES, setting
from ..compare import Comparison
from ..verdict import PREDICTED_TIE_PCT, metric_of
from .page import Verdict
from .reason import why

SHOWN_SETTINGS = 6
HIDDEN_PCT = 20.0
PREDICTED = " This is a prediction; nothing was measured."
PARTLY = " Part of it is predicted, not measured."
RANK = {"gain": 0, "open": 1, "even": 2, "loss": 3}


@dataclass(frozen=True)
class Judged:
    """The best line of one setting, its baseline, the side that decides ("measured", "predicted") and the outcome."""

    line: Any
    base: Any
    side: str
    outcome: str
    tried: int

    @property
    def metric(self) -> str:
        return metric_of(self.line)

    def ms(self, which: Any) -> float:
        return float(which[f"{self.metric}_ms_{self.side}"])


def answer(comparison: Comparison) -> Verdict:
    """The box on top of a comparison's report."""
    judged = judged_settings(comparison)
    if not judged:
        return _no_answer(bool((comparison.table.verdict == "baseline").all()))
    top = judged[0]
    many = len(judged) > 1
    points = [("By how much", _how_much(top))]
    if many:
        points.append(("Where", _where(comparison, judged)))
    points += [("Why", why(comparison, top.line, top.base, top.side)), ("How sure", _how_sure(comparison, top))]
    return Verdict(top.outcome, _headline_many(judged) if many else _headline(top), points)


def _no_answer(baselines_only: bool) -> Verdict:
    told, rest = "No baseline (contiguous experts, requests in turn, tokens in order) shares a setting.", "the baseline"
    if baselines_only:
        told, rest = "Every row is a baseline: contiguous experts, requests in turn, tokens in order.", "a policy"
    points = [("Why", told), ("What next", f"Sweep {rest} too, such as -m placement=contiguous,semantic.")]
    return Verdict("open", "No answer: there is no pair of a baseline and a policy to compare.", points)


def judged_settings(comparison: Comparison) -> list[Judged]:
    """The best of every setting that has a baseline; what the verdict is about comes first."""
    judged = [best for best in map(_best, _settings(comparison)) if best is not None]
    return sorted(judged, key=lambda j: (RANK[j.outcome], j.side != "measured", -j.line.gain_pct))


def _settings(comparison: Comparison) -> list[pd.DataFrame]:
    """Lines of the table that may be held against each other, setting by setting."""
    first = comparison.rows.groupby("key", sort=False).first()
    same = [repr(setting(first.loc[key])) for key in comparison.table.key]
    return [group for _, group in comparison.table.groupby(same, sort=False)]


def _best(lines: pd.DataFrame) -> Judged | None:
    """The best configuration of a setting: the largest gain that holds, otherwise the one with the most locality."""
    tried = lines[lines.gain_pct.notna()]
    if tried.empty:
        return None
    measured = tried[[not math.isnan(line[f"{metric_of(line)}_ms_measured"]) for _, line in tried.iterrows()]]
    side, tried = ("measured", measured) if len(measured) else ("predicted", tried)
    outcomes = tried.apply(lambda line: _outcome(line, side), axis=1)
    for outcome in RANK:
        if (outcomes == outcome).any():
            break
    alike = tried[outcomes == outcome]
    local = alike[f"lar_{'measured' if side == 'measured' else 'replayed'}"]
    place = local.idxmax() if outcome == "even" and local.notna().any() else alike.gain_pct.idxmax()
    line = alike.loc[place]  # type: ignore[call-overload]
    base = lines[lines.configuration == line.baseline]
    return Judged(line, base.iloc[0], side, outcome, len(tried)) if len(base) else None


def _outcome(line: Any, side: str) -> str:
    if side == "predicted":
        return "even" if abs(line.gain_pct) < PREDICTED_TIE_PCT else "gain" if line.gain_pct > 0 else "loss"
    if math.isnan(line.gain_low_pct) or line.repeats < 2:
        return "open"
    if line.gain_low_pct <= 0 <= line.gain_high_pct:
        return "even" if line.gain_high_pct <= HIDDEN_PCT else "open"
    return "gain" if line.gain_pct > 0 else "loss"


def _headline(best: Judged) -> str:
    sure = "Yes" if best.side == "measured" else "Probably"
    text = {
        "gain": f"{sure}: it pays here, by {_size(best.line.gain_pct)} % of the {_what(best)}.",
        "even": f"No gain here: {_none_of(best)} faster than the better baseline beyond the noise.",
        "loss": f"No: {_none_of(best)} faster than the better baseline; the best is {_size(best.line.gain_pct)} % slower.",
        "open": f"Undecided: {_undecided(best)}.",
    }[best.outcome]
    return text + (PREDICTED if best.side == "predicted" else "")


def _undecided(best: Judged) -> str:
    if best.line.repeats < 2 or math.isnan(best.line.gain_high_pct):
        return "measured once, which does not show how much runs differ"
    return f"repeats differ so much that a gain of up to {_size(best.line.gain_high_pct)} % could hide in the noise"


def _headline_many(judged: list[Judged]) -> str:
    count = {outcome: sum(j.outcome == outcome for j in judged) for outcome in RANK}
    text = f"It pays in {count['gain'] or 'none'} of {len(judged)} settings"
    gains = sorted(j.line.gain_pct for j in judged if j.outcome == "gain")
    if gains:
        text += f", by {_size(gains[0])} to {_size(gains[-1])} %" if len(gains) > 1 else f", by {_size(gains[0])} %"
    for outcome, words in (("even", "no gain in"), ("loss", "a loss in"), ("open", "undecided in")):
        text += f", {words} {count[outcome]}" if count[outcome] else ""
    sides = {j.side for j in judged}
    return f"{text}." + (PREDICTED if sides == {"predicted"} else PARTLY if len(sides) > 1 else "")


def _none_of(best: Judged) -> str:
    return f"none of {best.tried} configurations is" if best.tried > 1 else "the configuration tried is not"


def _what(best: Judged) -> str:
    return "end-to-end time of a request" if best.metric == "e2e" else "time of an MoE layer"


def _how_much(best: Judged) -> str:
    line, base = best.line, best.base
    what = "end to end" if best.metric == "e2e" else "a layer"
    text = f"{line.configuration}: {best.ms(line):.4g} ms {what} {best.side}, against {best.ms(base):.4g} ms for the better "
    text += f"baseline ({base.configuration}): {_signed(line.gain_pct)} %"
    if best.side == "measured" and not math.isnan(line.gain_low_pct):
        text += f", 95 % interval {_signed(line.gain_low_pct)} to {_signed(line.gain_high_pct)} %"
    return text + " (plus: time saved)."


def _where(comparison: Comparison, judged: list[Judged]) -> str:
    """The best of each setting, by what tells the settings apart."""
    names = [n for n in comparison.axes if n not in POLICIES and len({str(j.line[n]) for j in judged}) > 1]
    told = []
    for best in judged:
        known = [n for n in names if not pd.isna(best.line[n]) and best.line[n] != "-"]
        where = ", ".join(
            f"{n} {best.line[n]:g}" if isinstance(best.line[n], float) else f"{n} {best.line[n]}" for n in known
        )
        told.append(f"{where or best.line.configuration}: {_signed(best.line.gain_pct)} %")
    rest = len(told) - SHOWN_SETTINGS
    return "; ".join(told[:SHOWN_SETTINGS]) + (f"; and {rest} more in the table." if rest > 0 else ".")


def _how_sure(comparison: Comparison, best: Judged) -> str:
    rows = comparison.rows[comparison.rows.key == best.line.key]
    trace = f" Routes: the held-out part of {', '.join(sorted(set(rows.trace)))}."
    if best.side == "predicted":
        sources = ", ".join(sorted(set(rows.provenance.dropna())))
        return f"Predicted alone, from: {sources}. `semmoe measure` with the same overrides measures it.{trace}"
    told = [f"{best.line.repeats} repeats" if best.line.repeats > 1 else "one repeat; repeats=3 gives an interval"]
    spread = best.line[f"{best.metric}_spread_pct"]
    if not math.isnan(spread):
        told.append(f"which differ by {spread:.0f} %")
    text = " ".join(told) + "."
    if best.tried > 1 and best.outcome == "gain":
        text += f" Best of {best.tried} tried: each interval alone holds at 95 %, the best of several less often."
    errors = comparison.summary.get(best.metric)
    if errors:
        text += f" The simulator was {errors['median_error_pct']:.0f} % off in the median of {errors['count']} configurations."
    return text + trace


def _size(pct: float) -> str:
    return f"{abs(pct):.{1 if abs(pct) < 10 else 0}f}"


def _signed(pct: float) -> str:
    return "below -999" if pct < -999 else f"{'-' if pct < 0 else '+'}{_size(pct)}"
