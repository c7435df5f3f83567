"""Advice, computed: does semantic parallelism pay for this model, cluster and traffic, by how much, and what else would?

    traffic ──served twice (without policies, with)──> tokens of a decode and of a prefill step, end-to-end gain
    every valid flow x dispatcher at both sizes ──> a layer's phases without policies and co-scheduled, per
        bootstrap sample of held-out requests ──> gain over the *better* baseline, its interval, the reason of a null

The interval joins the uncertainty of the cost model (cost/uncertainty.py) with that of the routes: both sides run the
same tokens of SAMPLES bootstrap samples of the held-out requests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from semmoe.builder import RunBuilder
from semmoe.config import conf_dir
from semmoe.locality import LocalityMeter
from semmoe.run import Run

from . import app
from .app import step_timer
from .cost.uncertainty import interval, possible_ms

SAMPLES = 6  # bootstrap samples of the held-out requests
TIE_PCT = 1.0  # predictions closer than this are not told apart
LADDER = (16, 64, 256, 1024, 4096)  # tokens a rank on which the break-even batch is looked for
EXCHANGES = ("srs", "dispatch", "combine", "sag")
CELLS = (
    ("dp", "allgather_rs"),
    ("dp", "a2a_assignment"),
    ("dp", "a2a_dedup"),
    ("dp", "low_latency"),
    ("tp_shuffled", "a2a_assignment"),
    ("tp_shuffled", "a2a_dedup"),
    ("tp_shuffled", "low_latency"),
)
BASE = {
    "placement": "contiguous",
    "request_scheduler": "round_robin",
    "token_scheduler": "none",
    "predictor": "token_table",
}
OURS = {
    "dp": {"placement": "semantic", "request_scheduler": "semantic"},
    "tp_shuffled": {"placement": "semantic", "predictor": "fusion", "token_scheduler": "semantic"},
}
QUICK = {"restarts": 2, "sample_tokens": 2048}  # of a token-level placement: a verdict, not a deployment
QUICK_FUSION = {"refine": 0.0, "fit_tokens": 512}  # likewise of its predictor, whose fit is most of an advice's time
DECODE_ONLY = ("low_latency",)


@dataclass(frozen=True, eq=False)
class Layer:
    """One configuration's MoE layer at one size: phases (ms) of every sample [S], and what was counted."""

    name: str
    phases: dict[str, NDArray[np.float64]]
    lar: float
    imbalance: float
    meter: LocalityMeter | None = None

    @cached_property
    def ms_S(self) -> NDArray[np.float64]:
        return np.sum(list(self.phases.values()), axis=0)

    @property
    def ms(self) -> float:
        return float(self.ms_S.mean())

    @property
    def means(self) -> dict[str, float]:
        return {name: float(values.mean()) for name, values in self.phases.items()}

    @property
    def exchange_ms(self) -> float:
        return sum(value for name, value in self.means.items() if name in EXCHANGES)


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


class Desk:
    """Runs of one base configuration with other flows, dispatchers and policies; fits are shared."""

    def __init__(self, config: dict[str, Any], builder: RunBuilder | None = None) -> None:
        self.config, self.builder = config, builder or RunBuilder()

    def run(self, flow: str, dispatcher: str | dict[str, Any], **changes: Any) -> Run:
        """dispatcher, changes: a group's option by name, or its whole content; the config's other keys as they are."""
        config = copy.deepcopy(self.config)
        for group, value in {"flow": flow, "dispatcher": dispatcher, **BASE, **changes}.items():
            config[group] = value if isinstance(value, dict) else option(group, str(value))
        return self.builder.build(config)

    def ours(self, flow: str, dispatcher: str) -> Run:
        """Co-scheduled: semantic placement and scheduling."""
        return self.run(flow, dispatcher, **(OURS[flow] | self._quick(flow, "semantic")))

    def placed(self, flow: str, dispatcher: str, placement: str) -> Run:
        """A placement alone: requests in turn, tokens in order; semantic ones are those of `ours`."""
        return self.run("dp" if flow == "dp" else "tp_scattered", dispatcher, **self._quick(flow, placement))

    def _quick(self, flow: str, placement: str) -> dict[str, Any]:
        if flow == "dp" or placement != "semantic":
            return {"placement": placement}
        return {"placement": option("placement", placement) | QUICK,
                "predictor": option("predictor", "fusion") | QUICK_FUSION}  # fmt: skip

    def layer(self, run: Run, tokens_a_rank: int, name: str = "") -> Layer:
        """Price one batch of every sample of held-out requests."""
        timer, trace = step_timer(run), run.heldout
        ranks = run.request_rank_R if run.spec.flow == "dp" else None
        for rows_T in self.samples(run, tokens_a_rank * run.ep_size):
            timer.run(rows_T, None if ranks is None else ranks[trace.request_T[rows_T]], None)
        steps = timer.timeline.steps
        names = list(steps[0].phases_L)
        phases = {name: np.array([step.phases_L[name].mean() for step in steps]) for name in names}
        counted = timer.timeline.meter.columns()
        return Layer(name, phases, counted["lar"], counted["imbalance_step"], timer.timeline.meter)

    def samples(self, run: Run, tokens: int) -> Iterable[NDArray[np.int64]]:
        """Rows of SAMPLES batches, each from held-out requests drawn with replacement, the same for every configuration."""
        trace = run.heldout
        for sample in range(SAMPLES):
            rng = np.random.default_rng(sample)
            times_R = np.bincount(
                rng.integers(trace.num_requests, size=trace.num_requests), minlength=trace.num_requests
            )
            rows = np.repeat(np.arange(trace.num_tokens), times_R[trace.request_T])
            yield rng.choice(rows, tokens, replace=len(rows) < tokens)


def option(group: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


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


def serve(run: Run) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """(serving columns, tokens of every step) of the traffic on a whole model."""
    whole = replace(run, cfg=run.cfg | {"scope": "full_model"})
    columns, timers = app.serve(whole)
    return columns, np.array([plan.num_tokens for timer in timers for plan in timer.timeline.plans])


def step_sizes(tokens_N: Sequence[int] | NDArray[np.int64], ranks: int) -> tuple[int, int]:
    """Tokens a rank of a typical decode step (median of the smaller half) and of a large one (p95): powers of two."""
    ordered = np.sort(np.asarray(tokens_N))
    small, large = float(np.median(ordered[: max(len(ordered) // 2, 1)])), float(np.quantile(ordered, 0.95))
    return tuple(int(2 ** np.clip(round(np.log2(max(v / ranks, 1.0))), 0, 12)) for v in (small, large))  # type: ignore[return-value]
