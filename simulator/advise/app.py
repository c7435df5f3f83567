"""`semmoe advise`: one page on whether semantic parallelism pays, in the terminal and as HTML (computed in judge.py).

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

from semmoe.bars import progress
from semmoe.builder import RunBuilder
from semmoe.config import compose_one
from semmoe.errors import UserError
from semmoe.files import check_writable
from semmoe.inputs import warn_uncalibrated
from semmoe.plan_store import PlanStore
from semmoe.run import Run
from semmoe.specs import ClusterSpec

from .desk import Desk, Layer, serve, step_sizes
from .drift import drift_said
from .judge import CELLS, LADDER, Cell, break_even_batch, judge, sizes, valid_cells
from .levers import levers
from .policies import best_looking, best_said, better_still, try_policies

WIDTH = 112
PLAIN = {"dp": "dp", "tp_shuffled": "tp_scattered"}  # the flow without a scheduler
DEFAULTS = {
    "trace": "profile",
    "workload": "serve",
    "workload.num_requests": "100",
    "cost.allow_roofline": "true",
    "planned_folds": "0",
}
PROFILE_SIZE = {"trace.requests": "96", "trace.prompt_len": "256", "trace.output_len": "32"}
CELL_COLUMNS = {  # of Cell, in the order and under the headings of the page
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
    "twin_ms": "twin ms",
    "ours_ms": "ours ms",
    "verdict": "verdict",
    "reason": "why",
}
POLICY_COLUMNS = {  # of Tried
    "phase": "step",
    "tokens_a_rank": "tokens/rank",
    "flow": "flow",
    "dispatcher": "dispatcher",
    "policy": "policies",
    "layer_ms": "layer ms",
    "gain_pct": "gain %",
    "low_pct": "low %",
    "high_pct": "high %",
    "lar": "LAR",
    "imbalance": "imbalance",
}
SIZE_COLUMNS = {  # of Size
    "tokens_a_rank": "tokens/rank",
    "exchange_before_pct": "exchange before %",
    "exchange_pct": "exchange %",
    "gain_pct": "gain %",
}
KNOWN_BY = re.compile(r"\b(measured|fitted|alpha-beta fit|assumed|roofline|uncalibrated)\b")


@dataclass(frozen=True, eq=False)
class Advice:
    """The page as plain data: headline, points (question, answer), cells, policies, batch sizes and levers as tables.

    before, after: the layers without policies and co-scheduled of the best cell, for the pictures."""

    title: str
    kind: str
    headline: str
    points: list[tuple[str, str]]
    cells: pd.DataFrame
    policies: pd.DataFrame
    sizes: pd.DataFrame
    levers: pd.DataFrame
    before: Layer
    after: Layer


def advise(overrides: Sequence[str]) -> Advice:
    """The advice for a configuration given as overrides. UserError for what cannot work."""
    config = _config(overrides)
    warn_uncalibrated([config["cluster"]])
    plans = PlanStore(Path(config["results_dir"]) / "plans", renew=bool(config["rerun"]))
    desk, known = Desk(config, RunBuilder(plans)), dict[Any, Layer]()
    with progress(len(CELLS) + len(valid_cells("prefill")) + 8, "advise") as bar:
        return _advise(config, desk, known, bar)


def _advise(config: dict[str, Any], desk: Desk, known: dict[Any, Layer], bar: Any) -> Advice:
    def stage(words: str) -> None:
        bar.set_description_str(f"advise: {words}")
        bar.update()

    stage("routes and plans")
    bare, ours = desk.run("dp", "a2a_dedup"), desk.ours("dp", "a2a_dedup")
    stage("serving without policies")
    without, tokens_N = serve(bare)
    stage("serving with them")
    with_, _ = serve(ours)
    step_tokens = dict(zip(("decode", "prefill"), step_sizes(tokens_N, bare.ep_size), strict=True))
    cells: list[Cell] = []
    pulled: list[tuple[str, float, str]] = []
    for phase, tokens in step_tokens.items():
        here = []
        for flow, dispatcher in valid_cells(phase):
            stage(f"{phase}, {flow}, {dispatcher}")
            here.append(judge(desk, flow, dispatcher, phase, tokens, known))
        ours_dp = max((cell for cell in here if cell.flow == "dp"), key=lambda cell: cell.gain_pct)
        pulled += levers(desk, phase, tokens, known, ours_dp)
        cells += here
    stage("other policies")
    tried = [row for cell in best_looking(cells) for row in try_policies(desk, cell, known)]
    stage("batch sizes")
    by_size = sizes(desk, "dp", "a2a_dedup", known)
    best = max(cells, key=lambda cell: cell.gain_pct)
    kind, headline = _headline(best)
    headline += better_still(best, tried)
    stage("costs")
    cost = _cost(desk, best)
    stage("drift")
    points = [
        ("Traffic", _traffic(config, bare, step_tokens, without)),
        ("End to end", _end_to_end(without, with_, config)),
        ("Best policy", best_said(tried)),
        ("What it costs", cost),
        ("Break-even", _break_even(cells, break_even_batch(by_size))),
        ("Risk under drift", drift_said(desk, best)),
        ("Where it comes from", f"times: {_sources(ours.cluster)}; routes: {bare.heldout.path}"),
    ]
    return Advice(
        f"{bare.model.name} on {bare.cluster.name}, EP{bare.ep_size}", kind, headline, points, _frame(cells, CELL_COLUMNS),
        _frame(tried, POLICY_COLUMNS), _frame(by_size, SIZE_COLUMNS), pd.DataFrame(pulled, columns=["lever", "gain %", "note"]),
        known[(PLAIN[best.flow], best.dispatcher), best.tokens_a_rank],
        known[(best.flow, best.dispatcher, "co-scheduled"), best.tokens_a_rank],
    )  # fmt: skip


def _frame(rows: Sequence[Any], columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame([asdict(row) for row in rows])[list(columns)].rename(columns=columns)


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
    start = time.process_time()
    run.recipe.place(run.fitted.profile, run.fitted.predictor)
    seconds = time.process_time() - start
    tables = float(getattr(run.fitted.predictor, "table_bytes", 0)) / 1e6
    moved = run.model.num_moe_layers * run.model.num_experts * run.model.expert_bytes / run.ep_size / 1e9
    return (
        f"tables {tables:.1f} MB a rank; no extra weights; placing again {seconds:.0f} s of processor off the machine, then "
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
    lines += ["", "Policies where co-scheduling looks best, fastest first; percent of the better baseline:"]
    lines += [
        f"  {row['gain %']:+6.1f} %  {row['step']} {row['flow']} {row['dispatcher']}: {row['policies']}"
        for row in advice.policies.to_dict("records")
    ]
    lines += ["", "Levers, percent of a layer against one copy per assignment without policies:"]
    lines += [f"  {row['gain %']:+6.1f} %  {row['lever']}  ({row['note']})" for row in advice.levers.to_dict("records")]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the advice; html=FILE writes the page too."""
    html = [word.split("=", 1)[1] for word in argv if word.startswith("html=")]
    for path in html:
        check_writable(path)
    advice = advise([word for word in argv if not word.startswith("html=")])
    print(render(advice))
    if html:
        from .page import write_html

        write_html(advice, Path(html[0]), "semmoe advise " + shlex.join(argv))
        print(f"page: {html[0]}")
    return 0
