"""Advice, computed: does semantic parallelism pay for this model, cluster and traffic, and by how much?

    traffic ──served twice (without policies, with)──> tokens of a decode and of a prefill step, end-to-end gain
    every valid flow x dispatcher at both sizes ──> a layer's phases without policies and co-scheduled, per
        bootstrap sample of held-out requests ──> gain over the *better* baseline, its interval, the reason of a null

The interval joins the uncertainty of the cost model (cost/uncertainty.py) with that of the routes: both sides run the
same tokens (desk.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semmoe.run import Run

from ..cost.uncertainty import interval, possible_ms
from .desk import Desk, Layer

TIE_PCT = 1.0  # predictions closer than this are not told apart
LADDER = (16, 64, 256, 1024, 4096)  # tokens a rank on which the break-even batch is looked for
CELLS = (
    ("dp", "allgather_rs"),
    ("dp", "a2a_assignment"),
    ("dp", "a2a_dedup"),
    ("dp", "low_latency"),
    ("tp_shuffled", "a2a_assignment"),
    ("tp_shuffled", "a2a_dedup"),
    ("tp_shuffled", "low_latency"),
)
DECODE_ONLY = ("low_latency",)


@dataclass(frozen=True)
class Cell:
    """Co-scheduling in one flow and dispatcher at one size against the better baseline there. Gains in percent.

    twin_ms: the same dispatcher without policies."""

    flow: str
    dispatcher: str
    phase: str
    tokens_a_rank: int
    baseline: str
    baseline_ms: float
    twin_ms: float
    ours_ms: float
    gain_pct: float
    low_pct: float
    high_pct: float
    lar_before: float
    lar: float
    break_even_lar: float
    verdict: str
    reason: str


def valid_cells(phase: str) -> list[tuple[str, str]]:
    return [cell for cell in CELLS if phase == "decode" or cell[1] not in DECODE_ONLY]


def baselines(desk: Desk, flow: str, phase: str, tokens: int, known: dict[Any, Layer]) -> list[Layer]:
    """What no policy at all gives: every dispatcher of the flow; in attention-TP two all-reduces too."""
    names = [("dp", d) for f, d in valid_cells(phase) if f == "dp"] if flow == "dp" else [
        ("tp_replicated", "none"), *(("tp_scattered", d) for f, d in valid_cells(phase) if f != "dp")]  # fmt: skip
    for name in names:
        if (name, tokens) not in known:
            known[name, tokens] = desk.layer(desk.run(*name), tokens, f"{name[0]} {name[1]}")
    return [known[name, tokens] for name in names]


def judge(desk: Desk, flow: str, dispatcher: str, phase: str, tokens: int, known: dict[Any, Layer]) -> Cell:
    """One cell: co-scheduled layer against the better baseline."""
    rivals = baselines(desk, flow, phase, tokens, known)
    best = min(rivals, key=lambda layer: layer.ms)
    run, ours = co_scheduled(desk, flow, dispatcher, tokens, known)
    twin = next(r for r in rivals if r.name.endswith(dispatcher))
    low, high = gain_interval(ours, best, run)
    gain = 100 * (1 - ours.ms / best.ms)
    verdict, reason = told(ours, best, twin, gain, low, high, dispatcher)
    return Cell(flow, dispatcher, phase, tokens, best.name, best.ms, twin.ms, ours.ms, gain, low, high, twin.lar, ours.lar,
                break_even_lar(ours, twin, best), verdict, reason)  # fmt: skip


def co_scheduled(desk: Desk, flow: str, dispatcher: str, tokens: int, known: dict[Any, Layer]) -> tuple[Run, Layer]:
    """The co-scheduled run of a cell, and its layer, priced once."""
    run, key = desk.ours(flow, dispatcher), ((flow, dispatcher, "co-scheduled"), tokens)
    if key not in known:
        known[key] = desk.layer(run, tokens, f"{flow} {dispatcher}")
    return run, known[key]


def gain_interval(ours: Layer, baseline: Layer, run: Run, draws: int = 4000) -> tuple[float, float]:
    """80 % interval of the gain: random factors on the phases, times the spread over bootstrap samples of requests."""
    cost = possible_ms([ours.means, baseline.means], run.cluster, draws)
    spread = np.log(ours.ms_S / baseline.ms_S).std(ddof=1) if len(ours.ms_S) > 1 else 0.0
    routes = np.exp(spread * np.random.default_rng(1).standard_normal(draws))
    return interval(100 * (1 - cost[:, 0] / cost[:, 1] * routes))


def told(
    ours: Layer, best: Layer, twin: Layer, gain: float, low: float, high: float, dispatcher: str
) -> tuple[str, str]:
    """(verdict, reason) in plain words. twin: the baseline of the same dispatcher."""
    saved = twin.exchange_ms - ours.exchange_ms
    lost = ours.means["experts"] - twin.means["experts"]
    share = 100 * best.exchange_ms / best.ms
    if gain >= TIE_PCT and low > 0:
        return "pays", f"saves {1e3 * saved:.0f} us of exchange a layer against the same dispatcher"
    if gain >= TIE_PCT:
        return "may pay", f"the interval {low:+.0f} to {high:+.0f} % includes 0"
    if dispatcher == "allgather_rs":
        why = "dense dispatcher: every row goes everywhere whatever the placement"
    elif twin.ms > best.ms * 1.01 and ours.ms < twin.ms * 0.99:
        why = f"faster than without policies, but {best.name} without any is faster still"
    elif saved < -0.01 * twin.ms:
        why = f"crowding: like requests share ranks, whose ports are busier: exchange grows by {-1e3 * saved:.0f} us"
    elif saved > 0.01 * twin.ms and lost > 0.5 * saved:
        why = f"imbalance eats it: {1e3 * saved:.0f} us of exchange saved, {1e3 * lost:.0f} us of expert time lost"
    elif saved <= 0.01 * twin.ms and ours.lar - twin.lar > 0.05:
        why = f"floor-bound: LAR {twin.lar:.2f} to {ours.lar:.2f} saves {1e3 * saved:.0f} us of exchange a layer"
    elif lost > 0.01 * twin.ms:
        why = f"imbalance eats it: expert time grows by {1e3 * lost:.0f} us"
    else:
        why = f"little to gain: exchange is {share:.0f} % of the layer"
    return ("no gain expected" if gain > -TIE_PCT else "slower"), why


def break_even_lar(ours: Layer, twin: Layer, best: Layer) -> float:
    """LAR at which ours would be as fast as the better baseline: exchange time on the line through twin and ours.

    NaN where LAR does not move the exchange, or no LAR up to 1 would do.
    """
    gained = ours.lar - twin.lar
    slope = (twin.exchange_ms - ours.exchange_ms) / gained if abs(gained) > 1e-3 else 0.0
    if not slope > 1e-6:
        return float("nan")
    lar = ours.lar + (ours.ms - best.ms) / slope
    return float(lar) if lar <= 1 else float("nan")


@dataclass(frozen=True)
class Size:
    """One batch size: share of exchange in the layer without policies and co-scheduled, gain over the better baseline."""

    tokens_a_rank: int
    exchange_before_pct: float
    exchange_pct: float
    gain_pct: float


def sizes(desk: Desk, flow: str, dispatcher: str, known: dict[Any, Layer]) -> list[Size]:
    """Co-scheduling at every batch size of LADDER."""
    found = []
    for tokens in LADDER:
        rivals = baselines(desk, flow, "prefill", tokens, known)
        twin = next(r for r in rivals if r.name.endswith(dispatcher))
        _, ours = co_scheduled(desk, flow, dispatcher, tokens, known)
        before, after = (100 * layer.exchange_ms / layer.ms for layer in (twin, ours))
        found.append(Size(tokens, before, after, 100 * (1 - ours.ms / min(r.ms for r in rivals))))
    return found


def break_even_batch(found: Sequence[Size]) -> int | None:
    """Fewest tokens a rank from which on the gain stays above the tie; None: nowhere."""
    least = None
    for size in reversed(found):
        if size.gain_pct < TIE_PCT:
            break
        least = size.tokens_a_rank
    return least
