"""Re-placement at run time: learn a new placement from the routes just seen, move the weights, go on; does it pay?

Every `every_steps` steps predictor and placement are fitted anew on the rows that were processed since the last time (all
of them seen, none to come). The experts that a rank lacks then travel once, as one all-to-all whose rows are experts; the
part that is not overlapped stalls the next step. Fitting itself runs beside the steps and costs them nothing.

Each later step is priced twice, with the placement in force and with the first one, which never changed: gain = first -
in force, stalls apart. break_even_steps = a re-placement's mean stall / the mean gain of a step. In attention-DP requests keep
the ranks that the scheduler gave them by the first placement; in attention-TP homes follow the new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from semmoe.collective import Collective
from semmoe.migration import aligned, moved_experts_LGG
from semmoe.recipe import Fitted, Recipe
from semmoe.run import Run
from semmoe.stepplan import StepPlan, TokenRows
from semmoe.trace import RoutingTrace
from semmoe.traffic import Traffic

from .cost.attention import AttentionLoad
from .cost.model import CostModel
from .engine import StepTimer
from .layer import LayerTimes, time_layers
from .traffic_source import TracedTraffic, TrafficSource


@dataclass(frozen=True)
class Replacing:
    """Settings of config group `replacement` (values checked there); every_steps 0: never."""

    every_steps: int = 0
    overlap: float = 0.0


class ReplacingTimer(StepTimer):
    """A StepTimer whose placement changes on the way. See the module."""

    def __init__(self, run: Run, cost: CostModel, settings: Replacing, full_model: bool) -> None:
        super().__init__(run.planner(), cost, run.meter(), full_model, barrier_each_layer=run.kind == "batches")
        self.recipe: Recipe = run.recipe
        self.fitted: Fitted = run.fitted
        self.trace, self.settings = run.heldout, settings
        self.first: TrafficSource = TracedTraffic(run.planner(), cost.spec, cost.network.wiring)
        self._can_run_ahead = False
        self.stalls_ms: list[float] = []
        self.gains_ms: list[float] = []
        self.node_bytes = self.nic_bytes = 0.0
        self._seen: list[NDArray[np.int64]] = []

    def run(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> Traffic:
        due = len(self._seen) >= self.settings.every_steps
        stall_ms = self._replace() if due else 0.0
        traffic = super().run(rows_T, queue_T, load)
        self._seen.append(rows_T)
        times = self.timeline.steps[-1]
        if self.stalls_ms:
            self.gains_ms.append(self._first_step_ms(rows_T, queue_T, load) - times.step_ms)
        self.timeline.steps[-1] = replace(times, step_ms=times.step_ms + stall_ms)
        return traffic

    def run_plan(self, step: StepPlan, tokens: TokenRows, queues: int) -> LayerTimes:
        load = AttentionLoad.of(step, queues) if self.full_model else None
        self.run(*step.token_rows(tokens), load)
        self.timeline.plans.append(step)
        self.timeline.idle_rank_steps += queues - len(np.unique(step.rank_N))
        return self.timeline.steps[-1]

    def _replace(self) -> float:
        """Fit on what was seen, move, and return the stall in milliseconds."""
        fitted = self.recipe.fit(observed(self.trace, np.concatenate(self._seen)))
        old, wiring = self.fitted.placement, self.cost.network.wiring
        placement = aligned(fitted.placement, old, wiring, per_layer=self.recipe.home == "token")
        moved_GG = moved_experts_LGG(old, placement, wiring).sum(axis=0)
        weights = Collective("migration", self.recipe.model.expert_bytes, moved_GG[None])
        ports = weights.ports(wiring)
        self.node_bytes += float(ports.node_rows_L.sum()) * weights.row_bytes
        self.nic_bytes += float(ports.nic_rows_L.sum()) * weights.row_bytes
        moving_ms = self.cost.network.exchange_us(weights) / 1e3 if moved_GG.any() else 0.0
        self.stalls_ms.append((1 - self.settings.overlap) * moving_ms)
        self.fitted = replace(fitted, placement=placement)
        self.planner = self.recipe.planner(self.fitted, self.trace)
        self.source = TracedTraffic(self.planner, self.cost.spec, wiring)
        self._seen = []
        return self.stalls_ms[-1]

    def _first_step_ms(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> float:
        traffic = self.first.of_rows(rows_T, queue_T)
        return time_layers(self.cost, traffic, load, self.barrier_each_layer).step_ms

    def columns(self) -> dict[str, float | int | None]:
        """Columns of the row: what moved, what it cost, what it gained."""
        stall_ms = float(np.sum(self.stalls_ms))
        gain_ms = float(np.mean(self.gains_ms)) if self.gains_ms else None
        pays = gain_ms is not None and gain_ms > 0
        return {
            "replacements": len(self.stalls_ms),
            "migration_node_bytes": self.node_bytes,
            "migration_nic_bytes": self.nic_bytes,
            "replacement_stall_ms": stall_ms,
            "replacement_gain_ms": gain_ms,
            "replacement_net_ms": float(np.sum(self.gains_ms)) - stall_ms,
            "break_even_steps": stall_ms / len(self.stalls_ms) / gain_ms if pays and gain_ms else None,
        }


def observed(trace: RoutingTrace, rows: NDArray[np.int64]) -> RoutingTrace:
    """The part of a trace that these rows (in any order, repeated or not) are."""
    rows = np.unique(rows)
    requests, count_R = np.unique(trace.request_T[rows], return_counts=True)
    return replace(
        trace,
        experts_TLk=trace.experts_TLk[rows],
        token_id_T=trace.token_id_T[rows],
        request_offset_R1=np.concatenate([[0], np.cumsum(count_R)]),
        prompt_len_R=np.minimum(trace.prompt_len_R[requests], count_R),
        domain_R=trace.domain_R[requests],
        arrival_ms_R=None,
        gate_weight_TLk=None,
    )
