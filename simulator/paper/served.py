"""Pages about served requests: throughput under SLO in attention-DP, latency by input length in attention-TP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from semmoe.run import Run

from ..slo import PAPER_FACTOR, Capacity, Objective, at_rate, lightest_load, throughput_under_slo
from . import published
from .book import Book, Page, Table, kept, markdown, named, policy_name, simulated, table_of

SWEPT_RPS = (1.0, 10.0, 50.0, 100.0, 175.0)  # of experiment=paper/serving
START_RPS, TOLERANCE = 50.0, 0.02  # of the search for the largest rate


def serving(book: Book) -> Page:
    """Largest rate whose mean TTFT (or E2E) stays within the paper's SLO of vanilla, found by bisection, per policy."""
    curves: dict[tuple[str, str], dict[str, Curve]] = {}
    for run in book.runs("serving"):
        row = simulated(run)
        by_policy = curves.setdefault((row["model"], row["dispatcher"]), {})
        by_policy.setdefault(policy_name(pd.Series(row)), Curve(run)).rows[float(row["rate_rps"])] = row
    lines, said, found = [], [], []
    for (model, dispatcher), by_policy in curves.items():
        limit = lightest_load(by_policy["vanilla"].run)
        held = {policy: {"ttft": curve.most(replace(limit, e2e_ms=np.inf)), "e2e": curve.most(replace(limit, ttft_ms=np.inf))}
                for policy, curve in by_policy.items()}  # fmt: skip
        for policy, curve in by_policy.items():
            first, top = curve.ends()
            lines.append(
                {"model": model, "dispatcher": dispatcher, "policy": policy, "TTFT SLO rps": _rate(held[policy]["ttft"]),
                 "E2E SLO rps": _rate(held[policy]["e2e"]), "finished rps": f"{top['throughput_rps']:.0f}",
                 "TTFT ms, lightest to heaviest": f"{first['ttft_ms']:.0f} to {top['ttft_ms']:.0f}",
                 "E2E ms": f"{first['e2e_ms']:.0f} to {top['e2e_ms']:.0f}", "LAR": f"{top['lar_replayed']:.2f}"}
            )  # fmt: skip
            found += [row for _, row in sorted(curve.rows.items())]
        said += [_slo_said(model, dispatcher, ours, held) for ours in OURS if ours in held]
    same = sum(line.count("over vanilla +") + line.count("over moetuner +") for line in said)
    said.insert(0, f"Agreement: {same} of {4 * len(said)} gains have the paper's sign on this cluster.")
    rows = named(table_of(found))
    said += [_cause(model, group[group.rate_rps.isin(SWEPT_RPS)]) for model, group in rows.groupby("model", sort=False)]
    text = (
        f"SLO as in the paper and `semmoe slo slo=paper`: {PAPER_FACTOR:g} times the latency (mean) of vanilla at the lightest "
        "load; the largest rate that keeps it is found by bisection, to within "
        f"{100 * TOLERANCE:g} %. Lengths are ours (the paper gives none): 1,024 in, 32 out; Poisson arrivals, 160 requests a "
        "rate. Moonlight's routes are drawn from the profile of DeepSeek-V2-Lite, as many experts; the paper's figures "
        "of it are its means over three data sets.\n\n" + markdown(pd.DataFrame(lines))
    )
    return Page("serving", "Throughput under SLO, attention-DP", text, kept(rows).assign(policy=rows.policy),
                "\n".join(f"- {s}" for s in said))  # fmt: skip


@dataclass(eq=False)
class Curve:
    """Served rows of one configuration by request rate: those of the sweep, and those that a search asked for."""

    run: Run
    rows: dict[float, dict[str, Any]] = field(default_factory=dict)

    def most(self, objective: Objective) -> Capacity:
        """The largest rate that meets the objective."""
        return throughput_under_slo(self._at, objective, START_RPS, TOLERANCE)

    def ends(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The rows of the lightest and the heaviest load of the sweep."""
        return self.rows[min(SWEPT_RPS)], self.rows[max(SWEPT_RPS)]

    def _at(self, rate_rps: float) -> dict[str, Any]:
        if rate_rps not in self.rows:
            self.rows[rate_rps] = simulated(at_rate(self.run, rate_rps))
        return self.rows[rate_rps]


def _cause(model: str, group: Table) -> str:
    """What locality saves in exchange against what it costs in experts, at the middle rate."""
    rate = sorted(group.rate_rps.unique())[group.rate_rps.nunique() // 2]
    by_policy = group[group.rate_rps == rate].set_index("policy")
    ours, base = by_policy.loc[OURS[-1]], by_policy.loc["vanilla"]

    def more_ms(*names: str) -> float:
        return float(sum(ours[f"{name}_ms"] - base[f"{name}_ms"] for name in names))

    return (
        f"{model}, the cause, at {rate:g} requests/s: a request asks for the experts of its own rank, so that a step of few "
        f"prompts loads few ranks: expert rows max/mean {base.imbalance_step:.2f} (vanilla), {ours.imbalance_step:.2f} "
        f"({OURS[-1]}). Exchange changes by {more_ms('dispatch', 'combine'):+.3f} ms a layer, the slowest rank's experts by "
        f"{more_ms('experts'):+.3f} ms."
    )


def _rate(capacity: Capacity) -> str:
    return f"{capacity.rate_rps:.0f}" if capacity.bounded else f"> {capacity.rate_rps:.0f}"


def _slo_said(model: str, dispatcher: str, ours: str, held: dict[str, dict[str, Capacity]]) -> str:
    parts = []
    for base in ("vanilla", "moetuner"):
        for m, claim in zip(("ttft", "e2e"), published.SLO_GAIN_PCT[model, base], strict=True):
            a, b = held[ours][m], held[base][m]
            gain = f"{100 * (a.rate_rps / b.rate_rps - 1):+.0f} %" if a.bounded or b.bounded else "none of both broken"
            parts.append(f"{m.upper()} over {base} {gain} (paper {claim:+.0f} %)")
    return f"{model}, {dispatcher}, {ours}: " + ", ".join(parts) + "."


TABLE_2 = (("TTFT p99", "ttft_ms_p99", published.TTFT_P99_MS), ("E2E p50", "e2e_ms_p50", published.E2E_P50_MS))
OURS = ("Sem-MoE as published", "semantic + semantic")


def latency(book: Book) -> Page:
    """p99 TTFT and median E2E by input length, gains counted the paper's way and the honest way."""
    rows = named(book.rows("latency"))
    gains: Table = pd.DataFrame(
        [_gains(model, length, group.set_index("policy"), ours, figure)
         for (model, length), group in rows.groupby(["model", "max_prompt"], sort=False) for ours in OURS for figure in TABLE_2]
    )  # fmt: skip
    shown = gains.drop(columns=["of_two", "of_three"])
    said = []
    for ours in OURS:
        mine = gains[gains.policy == ours].groupby("figure")
        two, three = mine.of_two.agg(["min", "max"]), mine.of_three.agg(["min", "max"])
        said.append(
            f"{ours}: against the better of vanilla and MoETuner p99 TTFT falls by {two.loc['TTFT p99', 'min']:.1f} to "
            f"{two.loc['TTFT p99', 'max']:.1f} % (paper: 3.4 to 17.7 %), median E2E by "
            f"{two.loc['E2E p50', 'min']:.1f} to {two.loc['E2E p50', 'max']:.1f} % (paper: 0.03 to 1.1 %); with two "
            f"all-reduces too TTFT by {three.loc['TTFT p99', 'min']:.1f} to {three.loc['TTFT p99', 'max']:.1f} %, E2E by "
            f"{three.loc['E2E p50', 'min']:.1f} to {three.loc['E2E p50', 'max']:.1f} % (negative: slower)."
        )
    text = (
        "One request a second, 32 output tokens (the paper does not give its own), 100 requests, EP8, a2a_dedup. Positive: "
        "we are faster. *Paper's way*: worse of SGLang's vanilla and MoETuner / ours - 1. *Better of two*, *of three*: "
        "(baseline - ours) / baseline, the third being two all-reduces. The paper's own in brackets.\n\n"
        + markdown(shown)
    )
    table = kept(rows).assign(policy=rows.policy, max_prompt=rows.max_prompt)
    verdict = "\n".join(f"- {s}" for s in said)
    return Page("latency", "TTFT and end-to-end time by input length, attention-TP", text, table, verdict)


def _gains(model: str, length: int, by_policy: Table, ours: str, figure: Any) -> dict[str, Any]:
    word, column, theirs = figure
    value, replicated = float(by_policy.loc[ours, column]), float(by_policy.loc["two all-reduces", column])
    two = [float(by_policy.loc[base, column]) for base in ("vanilla", "moetuner")]
    *their_two, their_ours = theirs[model, length]
    of_two, of_three = published.reduction_pct(value, two), published.reduction_pct(value, [*two, replicated])
    return {
        "model": model,
        "input": length,
        "policy": ours,
        "figure": word,
        "vanilla / MoETuner / two all-reduces / ours, ms": " / ".join(f"{v:.1f}" for v in (*two, replicated, value)),
        "paper's way": f"{published.paper_pct(value, two):+.1f} ({published.paper_pct(their_ours, their_two):+.1f}) %",
        "better of two": f"{of_two:+.1f} ({published.reduction_pct(their_ours, their_two):+.1f}) %",
        "better of three": f"{of_three:+.1f} %",
        "of_two": of_two,
        "of_three": of_three,
    }
