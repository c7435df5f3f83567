"""Desk: the configurations that an advice asks about, and what a layer and the served traffic of each take.

A layer is priced on SAMPLES bootstrap samples of the held-out requests, the same tokens for every configuration.
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
from semmoe.run import Run
from semmoe.traffic.locality import LocalityMeter

from .. import app
from ..app import step_timer
from ..layer import EXCHANGES

SAMPLES = 6  # bootstrap samples of the held-out requests
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
