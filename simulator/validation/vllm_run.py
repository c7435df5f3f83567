"""A public serving run, replayed: 300 requests to vLLM, Qwen3-30B-A3B, DP2 EP2 on two RTX PRO 6000.

The requests' arrival times and lengths go through the project's own ServingLoop; steps last as long as the operator
tables say. What the files do not state is named in `Engine`, set once and varied in the report:

    max_running     128 a rank: the time series tops out at 256 running requests
    max_batch_tokens  2048: prompts of up to 2048 tokens get their first token a step after they start, longer ones two
    kv_tokens       no limit: the time series shows no KV pressure (kv_cache_pct 0)
    step_ms         host time a step (scheduling, sampling, detokenising): from the seconds of the time series in which
                    nothing prefills and nothing waits, `fitted_step_ms`
    eager_ms        shortest step that prefills, launched kernel by kernel instead of as a CUDA graph: the smallest
                    distance of two first tokens in the first five seconds, `fitted_eager_ms`
    skew            spread of expert popularity (sigma of its logarithm), assumed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semmoe.schedule.base import RankStates
from semmoe.serving import DECODE, Request, ServingLimits, ServingLoop, StepPlan, Stretch, TokenRows
from semmoe.traffic.locality import LocalityMeter

from ..engine import simulate_serving
from ..layer import LayerTimes
from ..step_timer import Timeline
from .row import Row, read
from .vllm_tables import LAYERS, PREFIX, RANKS, OperatorTables

BARS = {"TPOT": 2.0, "E2E": 4.0, "TTFT": 10.0}


@dataclass(frozen=True)
class Engine:
    """What the files do not state of the engine; see the module."""

    max_running: int = 128
    max_batch_tokens: int = 2048
    kv_tokens: int = 1 << 24
    step_ms: float = 2.72
    eager_ms: float = 55.0
    skew: float = 0.0


class LeastLoaded:
    """vLLM's front end: the rank with the smallest 4 * waiting + running."""

    def assign(self, request: Request, score_G: object, head_counts: object, ranks: RankStates) -> int:
        return int(np.argmin(4 * np.asarray(ranks.waiting_G) + np.asarray(ranks.running_G)))


class OperatorTimer:
    """Stands in for the StepTimer of a simulated cluster: durations from the operator tables."""

    def __init__(self, tables: OperatorTables, engine: Engine) -> None:
        self.tables, self.engine = tables, engine
        self.timeline = Timeline(LocalityMeter(1, RANKS))

    def run_plan(self, step: StepPlan, tokens: TokenRows, queues: int) -> LayerTimes:
        decode = step.phase_N == DECODE
        tokens_G = np.bincount(step.rank_N, weights=step.count_N, minlength=RANKS).astype(np.int64)
        sequences_G = np.bincount(step.rank_N, minlength=RANKS)
        attention_G = np.array([self._attention_us(step, step.rank_N == rank, decode) for rank in range(RANKS)])
        layer_us = self.tables.layer_us(tokens_G, attention_G, self.engine.skew)
        step_ms = (LAYERS * layer_us + self.tables.outside_us(tokens_G, sequences_G)) / 1e3 + self.engine.step_ms
        if not decode.all():
            step_ms = max(step_ms, self.engine.eager_ms)
        self.timeline.plans.append(step)
        self.timeline.steps.append(LayerTimes({}, step_ms))
        return self.timeline.steps[-1]

    def run_ahead(self, stretch: Stretch, tokens: TokenRows, queues: int) -> list[float]:
        """One step at a time."""
        return [self.run_plan(stretch.first, tokens, queues).step_ms]

    def keep(self, steps: int) -> None:
        """run_plan has recorded the step."""

    def _attention_us(self, step: StepPlan, mine_N: NDArray[np.bool_], decode_N: NDArray[np.bool_]) -> float:
        """Chunks of several prompts count as one with as many (query, key) pairs, decodes with their mean length."""
        prefill, decoding = mine_N & ~decode_N, mine_N & decode_N
        count, start = step.count_N[prefill].astype(float), step.start_N[prefill]
        chunk, decodes = count.sum(), int(decoding.sum())
        pairs = float((count * start + count**2 / 2).sum())
        earlier = max((pairs - chunk**2 / 2) / chunk, 0.0) if chunk else 0.0
        kv = float(step.kv_len_N[decoding].mean()) if decodes else 0.0
        return self.tables.attention.time_us(chunk, earlier, decodes, kv)


@dataclass(frozen=True, eq=False)
class PublicRun:
    """Requests (times in milliseconds since the first arrival at the engine) and the engine's own time series."""

    arrival_R: NDArray[np.float64]
    prompt_R: NDArray[np.int64]
    output_R: NDArray[np.int64]
    first_R: NDArray[np.float64]
    last_R: NDArray[np.float64]
    series: pd.DataFrame

    @classmethod
    def load(cls, data: Path) -> PublicRun:
        names = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
        table = read(data / f"{PREFIX}dp2ep2_vllm_requests.csv", names)
        columns = ("t", "prompt_throughput", "gen_throughput", "running", "waiting")
        series = read(data / f"{PREFIX}dp2ep2_vllm_timeseries.csv", columns)
        times = [1e3 * (table[name] - table.queued_ts.min()).to_numpy() for name in names[2:]]
        return cls(times[0], table.input_toks.to_numpy(), table.output_toks.to_numpy(), times[1], times[2], series)

    def requests(self) -> list[Request]:
        zipped = zip(self.arrival_R, self.prompt_R, self.output_R, strict=True)
        return [Request(i, float(at), int(prompt), int(output)) for i, (at, prompt, output) in enumerate(zipped)]


def replayed(run: PublicRun, tables: OperatorTables, engine: Engine) -> tuple[ServingLoop, Timeline]:
    """The run's requests through the scheduler, with step times from the tables."""
    limits = ServingLimits(engine.max_batch_tokens, engine.max_running, engine.kv_tokens)
    loop = ServingLoop(run.requests(), RANKS, limits, LeastLoaded())
    return loop, simulate_serving(loop, OperatorTimer(tables, engine))  # type: ignore[arg-type]


def metrics_ms(arrival: np.ndarray, first: np.ndarray, last: np.ndarray, output: np.ndarray) -> dict[str, np.ndarray]:
    """TPOT, E2E and TTFT of every request."""
    return {"TPOT": (last - first) / (output - 1), "E2E": last - arrival, "TTFT": first - arrival}


def errors(run: PublicRun, loop: ServingLoop) -> dict[str, float]:
    """Signed error of each mean and the median absolute error over requests, percent."""
    real = metrics_ms(run.arrival_R, run.first_R, run.last_R, run.output_R)
    guess = metrics_ms(loop.arrival_ms_R, loop.first_token_ms_R, loop.finish_ms_R, loop.output_R)
    values = {}
    for name in BARS:
        values[f"{name} mean"] = 100 * float(guess[name].mean() / real[name].mean() - 1)
        values[f"{name} median request"] = 100 * float(np.median(np.abs(guess[name] / real[name] - 1)))
    return values


def fitted_eager_ms(run: PublicRun, until_ms: float = 5000.0) -> float:
    """Smallest distance of two steps that gave first tokens, early in the run."""
    first = np.sort(run.first_R[run.first_R < until_ms])
    gaps = np.diff(first)
    return float(gaps[gaps > 5.0].min())


def fitted_step_ms(run: PublicRun, tables: OperatorTables, engine: Engine) -> float:
    """Median gap between observed and tabulated step time over the seconds of pure decode.

    In such a second every running request gets one token a step: step = running / tokens a second. The simulated steps
    that are compared with it have the closest number of running requests.
    """
    _, timeline = replayed(run, tables, replace(engine, step_ms=0.0))
    both = zip(timeline.plans, timeline.steps, strict=True)
    pure = [(len(plan.request_N), times.step_ms) for plan, times in both if (plan.phase_N == DECODE).all()]
    running, step_ms = np.array(pure).T
    quiet = run.series[(run.series.prompt_throughput == 0) & (run.series.waiting == 0) & (run.series.running >= 20)]
    before = run.series.running.shift().reindex(quiet.index)
    gaps = []
    for (_, second), previous in zip(quiet.iterrows(), before, strict=True):
        mean_running = (second.running + previous) / 2
        near = np.abs(running - mean_running) <= 5
        if near.any():
            gaps.append(1e3 * mean_running / second.gen_throughput - float(np.median(step_ms[near])))
    return float(np.median(gaps))


def vllm_rows(data: Path) -> list[Row]:
    """The run with the engine as set, what the settings do, and the run without any host time."""
    run, tables = PublicRun.load(data), OperatorTables(data)
    engine = Engine()
    loop, _ = replayed(run, tables, engine)
    bars = {f"{name} mean": bar for name, bar in BARS.items()}
    note = f"{engine}; signed errors of the means, then the median over requests of absolute errors"
    rows = [
        Row("vllm.run", "vLLM, Qwen3-30B-A3B DP2 EP2, 300 requests", errors(run, loop), bars, len(run.prompt_R), note)
    ]
    for word, change in VARIATIONS:
        varied, _ = replayed(run, tables, replace(engine, **change))  # type: ignore[arg-type]
        rows.append(Row(f"vllm.{word}", f"  the same, {word}", errors(run, varied), {}, len(run.prompt_R)))
    return rows


VARIATIONS: tuple[tuple[str, dict[str, float]], ...] = (
    ("no host time at all", {"step_ms": 0.0, "eager_ms": 0.0}),
    ("eager_ms=0", {"eager_ms": 0.0}),
    ("eager_ms=65", {"eager_ms": 65.0}),
    ("step_ms -1 ms", {"step_ms": 1.72}),
    ("step_ms +1 ms", {"step_ms": 3.72}),
    ("max_batch_tokens=1024", {"max_batch_tokens": 1024}),
    ("max_batch_tokens=8192", {"max_batch_tokens": 8192}),
    ("max_running=112", {"max_running": 112}),
    ("max_running=144", {"max_running": 144}),
    ("kv_tokens=160000 a rank", {"kv_tokens": 160_000}),
    ("skew=0.5", {"skew": 0.5}),
    ("skew=1.0", {"skew": 1.0}),
)
