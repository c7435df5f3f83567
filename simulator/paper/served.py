"""Pages about served requests: throughput under SLO in attention-DP, latency by input length in attention-TP."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from . import published
from .book import Book, Page, Table, kept, markdown, named

SLO_FACTOR = 5.0  # the paper's SLO: latency within five times that of the lightest load


def serving(book: Book) -> Page:
    """Largest rate whose mean TTFT (or E2E) stays within SLO_FACTOR times the lightest load's, per policy."""
    rows = named(book.rows("serving"))
    lines, said = [], []
    for (model, dispatcher), group in rows.groupby(["model", "dispatcher"], sort=False):
        vanilla = group[(group.policy == "vanilla")].sort_values("rate_rps")
        limits = {m: SLO_FACTOR * vanilla[f"{m}_ms"].iloc[0] for m in ("ttft", "e2e")}
        held = {}
        for policy, curve in group.groupby("policy", sort=False):
            curve = curve.sort_values("rate_rps")
            held[policy] = {m: rate_within(curve.rate_rps, curve[f"{m}_ms"], limits[m]) for m in limits}
            top = curve.iloc[-1]
            lines.append(
                {"model": model, "dispatcher": dispatcher, "policy": policy, "TTFT SLO rps": _rate(held[policy]["ttft"], curve),
                 "E2E SLO rps": _rate(held[policy]["e2e"], curve), "finished rps": f"{top.throughput_rps:.0f}",
                 "TTFT ms, lightest to heaviest": f"{curve.ttft_ms.iloc[0]:.0f} to {top.ttft_ms:.0f}",
                 "E2E ms": f"{curve.e2e_ms.iloc[0]:.0f} to {top.e2e_ms:.0f}", "LAR": f"{top.lar_replayed:.2f}"}
            )  # fmt: skip
        said += [_slo_said(model, dispatcher, ours, held, group.rate_rps.max())
                 for ours in OURS if ours in held]  # fmt: skip
    same = sum(line.count("over vanilla +") + line.count("over moetuner +") for line in said)
    said.insert(0, f"Agreement: {same} of {4 * len(said)} gains have the paper's sign on this cluster.")
    said += [_cause(model, group) for model, group in rows.groupby("model", sort=False)]
    text = (
        f"SLO as in the paper: {SLO_FACTOR:g} times the latency (mean) of vanilla at the lightest load. Lengths are ours (the "
        "paper gives none): 1,024 in, 32 out; Poisson arrivals, 160 requests a point; rates in between are interpolated. "
        "A rate with > was the largest tried.\n\n" + markdown(pd.DataFrame(lines))
    )
    return Page("serving", "Throughput under SLO, attention-DP", text, kept(rows).assign(policy=rows.policy),
                "\n".join(f"- {s}" for s in said))  # fmt: skip


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


def rate_within(rates: Table, latency_ms: Table, limit_ms: float) -> float:
    """Largest rate (log-interpolated) before the latency first exceeds the limit; inf where it never does."""
    rate, ms = rates.to_numpy(float), latency_ms.to_numpy(float)
    over = np.flatnonzero(ms > limit_ms)
    if not len(over):
        return float("inf")
    i = over[0]
    if i == 0:
        return 0.0
    share = (np.log(limit_ms) - np.log(ms[i - 1])) / (np.log(ms[i]) - np.log(ms[i - 1]))
    return float(np.exp(np.log(rate[i - 1]) + share * (np.log(rate[i]) - np.log(rate[i - 1]))))


def _rate(rate: float, curve: Table) -> str:
    return f"> {curve.rate_rps.max():.0f}" if np.isinf(rate) else f"{rate:.0f}"


def _slo_said(model: str, dispatcher: str, ours: str, held: dict[str, dict[str, float]], most: float) -> str:
    parts = []
    for base in ("vanilla", "moetuner"):
        for m, claim in zip(("ttft", "e2e"), published.SLO_GAIN_PCT[model, base], strict=True):
            a, b = held[ours][m], held.get(base, {}).get(m, float("nan"))
            if np.isinf(a) and np.isinf(b):
                gain = "none of both broken"
            else:
                gain = f"{100 * (min(a, most) / min(b, most) - 1):+.0f} %"
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
        "One request a second, 32 output tokens (the paper does not give its own), 12 requests, EP8, a2a_dedup. Positive: ours "
        "is faster. *Paper's way*: worse of SGLang's vanilla and MoETuner / ours - 1. *Better of two*, *of three*: (baseline - "
        "ours) / baseline, the third being two all-reduces. The paper's own in brackets.\n\n" + markdown(shown)
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
