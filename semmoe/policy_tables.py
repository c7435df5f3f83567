"""Tables of `semmoe evaluate policies`: which trials stand in them, by section, and the rows that bars are set for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .config import group_options
from .errors import UserError
from .trials import Bench, Policy, Trial, paired

COLUMNS = {
    "lar": "LAR",
    "fan_out": "fan-out",
    "imbalance_total": "load",
    "home_imbalance": "home balance",
    "after_head_lar": "LAR after head",
    "bytes_per_token": "KB a token",
    "kv_bytes_per_token": "KV KB a token",
    "planning_ms": "plan ms",
    "placement_s": "place CPU s",
    "gap": "gap",
}
OWN = Policy("semantic")  # our placement, token scheduler
FUSION = Policy("fusion")
WINDOWED = Policy("windowed", {"slack": 0.0})
DP_ONLY = ("after_head_lar", "kv_bytes_per_token")
ORDERS, BAR_ORDERS = 5, 20  # arrival orders where they matter


def tp_trials(placements: Sequence[str]) -> Iterator[tuple[str, Trial]]:
    """(section, trial) of attention-TP."""
    ours = Trial(flow="tp_shuffled", placement=OWN, predictor=FUSION, scheduler=OWN)
    yield "baseline", replace(ours, placement=Policy("contiguous"), predictor=Policy("none"), scheduler=Policy("none"))
    if "sem_moe" in placements:
        paper = replace(ours, placement=Policy("sem_moe"), predictor=Policy("paper"), scheduler=Policy("sort_cut"))
        yield "the paper's rules", paper
        yield "the paper's rules", replace(paper, scheduler=OWN)
    for name in placements:
        yield "placements", replace(ours, placement=Policy(name))
    yield "placements", replace(ours, placement=Policy("semantic", {"load_weight": 0.0}))
    yield "placements", replace(ours, home_cap=1.0)
    yield "placements", replace(ours, extra_slots=1)
    for name in ("none", "device_ngram", "token_table", "paper", "oracle"):
        yield "predictors", paired(ours, predictor=Policy(name))
    for name in group_options("token_scheduler"):
        if name != "semantic":
            yield "token schedulers", paired(ours, scheduler=Policy(name))


def dp_trials(placements: Sequence[str], ep_size: int) -> Iterator[tuple[str, Trial]]:
    """(section, trial) of attention-DP; several orders wherever a request's home depends on when it comes."""
    ours = Trial(flow="dp", placement=OWN, scheduler=WINDOWED)
    yield (
        "baseline",
        replace(ours, placement=Policy("contiguous"), scheduler=Policy("round_robin"), head_tokens=0, orders=ORDERS),
    )
    if "sem_moe" in placements:
        yield "the paper's rules", replace(ours, placement=Policy("sem_moe"), scheduler=Policy("mask"), orders=ORDERS)
    for name in placements:
        yield "placements, all requests in one window", replace(ours, placement=Policy(name))
    yield "placements, all requests in one window", replace(ours, extra_slots=1)
    window = 4 * ep_size if ep_size <= 4 else 2 * ep_size
    schedulers = [name for name in group_options("request_scheduler") if name not in ("windowed", "oracle", "semantic")]
    for name in schedulers:
        yield "request schedulers", replace(ours, scheduler=Policy(name), window=window, orders=ORDERS)
    for policy in (Policy("semantic", {"slack": 0.0}), WINDOWED, Policy("windowed", {"slack": 1.0})):
        yield "request schedulers", replace(ours, scheduler=policy, window=window, orders=ORDERS)
    for policy in (Policy("oracle", {"slack": 0.0}),):
        yield "request schedulers", replace(ours, scheduler=policy)


def bar_rows(bench: Bench) -> str:
    """The rows that issue-level bars are set for, on the published GPT-OSS routes: what is asked, what was measured."""
    ep_size = bench.ep_size
    at = 0 if ep_size == 4 else 1
    tp = Trial(flow="tp_shuffled", placement=OWN, predictor=FUSION, scheduler=OWN)
    dp = Trial(flow="dp", placement=OWN, scheduler=WINDOWED)
    window = replace(dp, window=4 * ep_size if ep_size <= 4 else 2 * ep_size, orders=BAR_ORDERS)
    figures: dict[str, dict[str, NDArray[np.float64]]] = {}
    for name, trial in (
        ("tp", tp),
        ("local", replace(tp, placement=Policy("semantic", {"load_weight": 0.0}))),
        ("table", paired(tp, predictor=Policy("token_table"))),
        ("oracle", paired(tp, scheduler=Policy("oracle"))),
        ("tp+1", replace(tp, extra_slots=1)),
        ("dp", dp),
        ("dp+1", replace(dp, extra_slots=1)),
        ("window", window),
        ("mask", replace(window, scheduler=Policy("mask"))),
    ):
        figures[name] = bench.run(trial)
        print(f"EP{ep_size} {name} {figures[name]['lar'].mean():.4f}", file=sys.stderr, flush=True)
    rows = []
    for what, one, bars in (
        ("TP load-bounded", "tp", ("LAR >= .55 at load <= 1.18, fan-out <= 1.42", "LAR >= .35 at <= 1.28, <= 2.32")),
        ("TP locality-first (load_weight=0)", "local", ("LAR >= .58", "LAR >= .40")),
        ("TP, one extra slot a rank", "tp+1", ("LAR >= .62 at load <= 1.20", "LAR >= .42 at <= 1.30")),
        ("DP load-bounded, head of 64, one window", "dp", ("LAR >= .33 at load <= 1.25", "LAR >= .17 at <= 1.40")),
        ("DP, one extra slot a rank", "dp+1", ("LAR >= .41", "LAR >= .26")),
    ):
        found = figures[one]
        cells = (f"{spread(found[c], c)}" for c in ("lar", "imbalance_total", "fan_out", "placement_s"))
        rows.append(f"| {what} | {bars[at]} | " + " | ".join(cells) + " |")
    lar = {name: found["lar"] for name, found in figures.items()}
    for what, values, bars in (
        ("fusion minus token table, same placement", lar["tp"] - lar["table"], (".07", ".055")),
        ("share of the LAR of oracle homes", lar["tp"] / lar["oracle"], (".90", ".83")),
        ("DP window minus the mask rule", lar["window"] - lar["mask"], (".025", ".008")),
    ):
        rows.append(f"| {what} | >= {bars[at]} | {spread(values, 'lar')} | | | |")
    head = "| | bar | LAR | load | fan-out | place CPU s |\n| --- | --- | --- | --- | --- | --- |\n"
    return f"## Bars, gptoss, EP{ep_size}\n\n" + head + "\n".join(rows)


def table(name: str, bench: Bench, placements: Sequence[str], gap_of: dict[str, float]) -> str:
    """Both halves of the report for one trace and EP size. gap_of: of every placement that has an objective."""
    parts = []
    for flow, trials in (("TP", tp_trials(placements)), ("DP", dp_trials(placements, bench.ep_size))):
        lines, section = [], ""
        columns = [c for c in COLUMNS if flow == "DP" or c not in DP_ONLY]
        for where, trial in trials:
            if where != section:
                section = where
                lines.append(f"| **{where}** |" + " |" * len(columns))
            start = time.perf_counter()
            try:
                figures = bench.run(trial)
            except UserError as error:
                lines.append(f"| {row_name(trial)} | {error} |" + " |" * (len(columns) - 1))
                continue
            plain = replace(trial, placement=Policy(trial.placement.name), extra_slots=0, home_cap=Trial.home_cap)
            known = where.startswith("placements") and trial == plain and trial.placement.name in gap_of
            gap = f"{gap_of[trial.placement.name]:.2%}" if known else ""
            cells = [spread(figures[c], c) if c != "gap" else gap for c in columns]
            lines.append(f"| {row_name(trial)} | " + " | ".join(cells) + " |")
            print(f"{name} EP{bench.ep_size} {flow} {lines[-1]} {time.perf_counter() - start:.0f} s", file=sys.stderr)
        head = f"| {flow}: placement, predictor, scheduler | " + " | ".join(COLUMNS[c] for c in columns) + " |"
        rule = "| --- |" + " --- |" * len(columns)
        parts.append("\n".join([head, rule, *lines]))
    return f"## {name}, EP{bench.ep_size}\n\n" + "\n\n".join(parts)


def row_name(trial: Trial) -> str:
    name = trial.placement.label + (f" +{trial.extra_slots} slot a rank" if trial.extra_slots else "")
    if trial.flow == "tp_shuffled":
        name += f", {trial.predictor.label}"
    name += f", {trial.scheduler.label}"
    if trial.window:
        name += f" (waiting {trial.window})"
    return name + ("" if trial.home_cap == 1.1 else f", home cap {trial.home_cap:g}")


def spread(values: NDArray[np.float64], column: str) -> str:
    """Mean and standard deviation over folds."""
    digits = 3 if column.endswith("lar") else 2
    if column.endswith("bytes_per_token"):
        values, digits = values / 1e3, 1
    deviation = values.std(ddof=1) if len(values) > 1 else float("nan")
    return f"{values.mean():.{digits}f} ± {deviation:.{digits}f}"
