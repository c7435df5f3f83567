"""`semmoe advise`: one page on whether semantic parallelism pays, in the terminal and as HTML (computed in advise.py).

    semmoe advise model=qwen3-30b-a3b cluster=h100x8 workload.rate_rps=20 slo.ttft_ms=500 [html=advice.html]

Takes the keys of `semmoe simulate`. Without trace= it draws routes from the affinity profile of the model, or of the
nearest one; the traffic is workload.rate_rps, workload.max_prompt and max_output (or the trace's lengths), and slo.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semmoe.config import compose_one
from semmoe.errors import UserError
from semmoe.report.page import Verdict, page, prose, table
from semmoe.results import write_atomically
from semmoe.run import Run
from semmoe.specs import ClusterSpec

from .advise import (
    LADDER,
    TIE_PCT,
    Cell,
    Desk,
    Layer,
    break_even_batch,
    homed_lar,
    judge,
    levers,
    serve,
    step_sizes,
    valid_cells,
)

WIDTH = 112
DEFAULTS = {
    "trace": "profile",
    "workload": "serve",
    "workload.num_requests": "100",
    "cost.allow_roofline": "true",
    "planned_folds": "0",
}
PROFILE_SIZE = {"trace.requests": "96", "trace.prompt_len": "256", "trace.output_len": "32"}
COLUMNS = {  # of Cell, in the order and under the headings of the page
    "flow": "flow",
    "dispatcher": "dispatcher",
    "phase": "step",
    "tokens_a_rank": "tokens/rank",
    "gain_pct": "gain %",
    "low_pct": "low %",
    "high_pct": "high %",
    "lar_before": "LAR before",
    "lar": "LAR",
    "break_even_lar": "break-even LAR",
    "baseline": "better baseline",
    "baseline_ms": "baseline ms",
    "ours_ms": "ours ms",
    "verdict": "verdict",
    "reason": "why",
}
NOTES = (
    "LAR: share of (token, expert) assignments served on the token's home rank.",
    "Break-even LAR: where co-scheduling would be as fast as the better baseline; empty: no LAR up to 1 would do.",
    "The interval joins the cost model's held-out error with a bootstrap over requests.",
)
KNOWN_BY = re.compile(r"\b(measured|fitted|alpha-beta fit|assumed|roofline|uncalibrated)\b")


@dataclass(frozen=True, eq=False)
class Advice:
    """The page as plain data: headline, points (question, answer), cells and levers as tables."""

    title: str
    kind: str
    headline: str
    points: list[tuple[str, str]]
    cells: pd.DataFrame
    levers: pd.DataFrame


def advise(overrides: Sequence[str]) -> Advice:
    """The advice for a configuration given as overrides. UserError for what cannot work."""
    config = _config(overrides)
    desk, known = Desk(config), dict[Any, Layer]()
    bare, ours = desk.run("dp", "a2a_dedup"), desk.ours("dp", "a2a_dedup")
    without, sizes = serve(bare)
    with_, _ = serve(ours)
    step_tokens = dict(zip(("decode", "prefill"), step_sizes(sizes, bare.ep_size), strict=True))
    cells: list[Cell] = []
    pulled: list[tuple[str, float, str]] = []
    for phase, tokens in step_tokens.items():
        here = [judge(desk, flow, dispatcher, phase, tokens, known) for flow, dispatcher in valid_cells(phase)]
        ours_dp = max((cell for cell in here if cell.flow == "dp"), key=lambda cell: cell.gain_pct)
        pulled += levers(desk, phase, tokens, known, ours_dp)
        cells += here
    best = max(cells, key=lambda cell: cell.gain_pct)
    kind, headline = _headline(best)
    schedule = "semantic request scheduling" if best.flow == "dp" else "fusion predictor, semantic token scheduling"
    points = [
        ("Traffic", _traffic(config, bare, step_tokens, without)),
        ("End to end", _end_to_end(without, with_, config)),
        ("Best policy", f"{best.flow}, {best.dispatcher}: semantic placement, {schedule}"),
        ("What it costs", _cost(desk, best)),
        ("Break-even", _break_even(cells, break_even_batch(desk, "dp", "a2a_dedup", known))),
        ("Risk under drift", _drift(desk, best)),
        ("Where it comes from", f"times: {_sources(ours.cluster)}; routes: {bare.heldout.path}"),
    ]
    frame = pd.DataFrame([asdict(cell) for cell in cells])[list(COLUMNS)].rename(columns=COLUMNS)
    title = f"{bare.model.name} on {bare.cluster.name}, EP{bare.ep_size}"
    return Advice(title, kind, headline, points, frame, pd.DataFrame(pulled, columns=["lever", "gain %", "note"]))


def _sources(cluster: ClusterSpec) -> str:
    """How each part of the times is known: "h100x8 (link measured, experts fitted, host_us assumed)"."""
    found = {part: KNOWN_BY.search(str(text)) for part, text in cluster.provenance.items()}
    said = ", ".join(f"{part} {match.group()}" for part, match in found.items() if match)
    return f"{cluster.name} ({said or 'datasheet figures'})"


def _config(overrides: Sequence[str]) -> dict[str, Any]:
    given = {word.split("=", 1)[0].lstrip("+") for word in overrides}
    given_groups = given & {"workload"}  # whose keys are then the user's business
    words = [f"{k}={v}" for k, v in DEFAULTS.items() if k not in given and k.split(".")[0] not in given_groups]
    if "trace" not in given:
        words += [f"{key}={value}" for key, value in PROFILE_SIZE.items() if key not in given]
    config = compose_one([*words, *overrides])
    if config["workload"]["kind"] != "serve":
        raise UserError("semmoe advise needs traffic: workload=serve (the default) with workload.rate_rps")
    return config


def _headline(best: Cell) -> tuple[str, str]:
    where = f"{best.flow} with {best.dispatcher}, {best.phase} steps of {best.tokens_a_rank} tokens a rank"
    span = f"{best.gain_pct:+.1f} % of a layer against the better baseline ({best.baseline}), "
    span += f"80 % interval {best.low_pct:+.1f} to {best.high_pct:+.1f} %"
    if best.verdict == "pays":
        return "gain", f"It pays in {where}: {span}."
    if best.verdict == "may pay":
        return "open", f"It may pay in {where}: {span}."
    return "even", f"No gain expected here. Best is {where}: {span}; {best.reason}."


def _traffic(config: dict[str, Any], run: Run, tokens: dict[str, int], row: dict[str, Any]) -> str:
    requests = run.workload.requests
    prompt, output = (np.mean([getattr(r, name) for r in requests]) for name in ("prompt_len", "output_len"))
    return (
        f"{config['workload'].get('rate_rps')} requests/s of {prompt:.0f} tokens in, {output:.0f} out; steps of about "
        f"{tokens['decode']} (decode) and {tokens['prefill']} (prefill) tokens a rank; finished "
        f"{row.get('throughput_rps', float('nan')):.1f}/s without policies"
    )


def _end_to_end(without: dict[str, Any], with_: dict[str, Any], config: dict[str, Any]) -> str:
    parts = []
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "end to end")):
        if name in without:
            a, b = without[name], with_[name]
            parts.append(f"{label} {a:.1f} to {b:.1f} ms ({100 * (b / a - 1):+.1f} %)")
    good = [row.get("goodput_rps", float("nan")) for row in (without, with_)]
    limits = f"({config['slo']['ttft_ms']} and {config['slo']['tpot_ms']} ms)"
    return f"attention-DP, a2a_dedup: {', '.join(parts)}; within the SLO {limits} {good[0]:.1f} to {good[1]:.1f}/s"


def _cost(desk: Desk, best: Cell) -> str:
    run = desk.ours(best.flow, best.dispatcher)
    start = time.perf_counter()
    run.recipe.fit(run.train)
    seconds = time.perf_counter() - start
    tables = float(getattr(run.fitted.predictor, "table_bytes", 0)) / 1e6
    moved = run.model.num_moe_layers * run.model.num_experts * run.model.expert_bytes / run.ep_size / 1e9
    return (
        f"tables {tables:.1f} MB a rank; no extra weights; planning again {seconds:.0f} s on one core off the machine, then "
        f"at most {moved:.1f} GB of experts into each rank ({1e3 * moved / run.cluster.link_gbps:.0f} ms of an idle link)"
    )


def _break_even(cells: Sequence[Cell], ladder: int | None) -> str:
    known = [
        f"{c.flow} {c.dispatcher} {c.phase} {c.break_even_lar:.2f} (has {c.lar:.2f})"
        for c in cells
        if not np.isnan(c.break_even_lar)
    ]
    size = f"from {ladder} tokens a rank on" if ladder else f"at no batch size up to {LADDER[-1]} tokens a rank"
    return f"LAR: {'; '.join(known) or 'no LAR up to 1 would do'}. Batch: dp a2a_dedup gains {size}."


def _drift(desk: Desk, best: Cell) -> str:
    """LAR of the same plan on another kind of text, and what is left of the locality there."""
    trace = desk.config["trace"]
    if not str(trace.get("_target_", "")).endswith("affinity.Drawn"):
        return "unknown for a recorded trace: record another day or domain and evaluate today's plan on it"
    run = desk.ours(best.flow, best.dispatcher)
    other = Desk(desk.config | {"trace": trace | {"domains": ["lmsys"]}}).run(best.flow, best.dispatcher)
    here, there = (homed_lar(run.recipe, run.fitted, r.heldout) for r in (run, other))
    kept = 100 * (there - 1 / run.ep_size) / (here - 1 / run.ep_size)
    return (
        f"on another kind of text (LMSYS-like) the same plan reaches LAR {there:.2f} instead of {here:.2f}, requests homed by "
        f"their measured heads: about {kept:.0f} % of the locality is left until it is planned again"
    )


def render(advice: Advice, width: int = WIDTH) -> str:
    """The page for a terminal."""
    lines = [advice.title, "=" * len(advice.title), *textwrap.wrap(advice.headline, width), ""]
    for question, answer in advice.points:
        lines += textwrap.wrap(f"{question}: {answer}", width, subsequent_indent="    ")
    shape = "{:12s} {:15s} {:8s} {:>8s} {:>7s} {:>16s} {:>11s}  {}"
    lines += ["", shape.format("flow", "dispatcher", "step", "tok/rank", "gain %", "80 % interval", "LAR", "verdict")]
    for row in advice.cells.to_dict("records"):
        span = f"{row['low %']:+.1f} to {row['high %']:+.1f}"
        lar = f"{row['LAR before']:.2f}>{row['LAR']:.2f}"
        words = (row["flow"], row["dispatcher"], row["step"], str(row["tokens/rank"]), f"{row['gain %']:+.1f}")
        lines.append(shape.format(*words, span, lar, row["verdict"]))
        lines += textwrap.wrap(row["why"], width - 4, initial_indent="    ", subsequent_indent="    ")
    lines += ["", "Levers, percent of a layer against one copy per assignment without policies:"]
    lines += [f"  {row['gain %']:+6.1f} %  {row['lever']}  ({row['note']})" for row in advice.levers.to_dict("records")]
    return "\n".join(lines)


def write_html(advice: Advice, path: Path, command: str) -> None:
    """The same page as self-contained HTML."""
    about = f"Gain of a layer over the better baseline; predictions within {TIE_PCT:g} % count as equal."
    sections = [
        table("cells", "Every flow and dispatcher", advice.cells, about),
        table("levers", "Levers", advice.levers, "Against one copy per assignment without policies."),
        prose("notes", "How to read it", NOTES),
    ]
    verdict = Verdict(advice.kind, advice.headline, advice.points)
    write_atomically(path, page(f"semmoe advise: {advice.title}", sections, verdict, command=command))


def main(argv: Sequence[str]) -> int:
    """Print the advice; html=FILE writes the page too."""
    html = [word.split("=", 1)[1] for word in argv if word.startswith("html=")]
    advice = advise([word for word in argv if not word.startswith("html=")])
    print(render(advice))
    if html:
        write_html(advice, Path(html[0]), "semmoe advise " + shlex.join(argv))
        print(f"page: {html[0]}")
    return 0
