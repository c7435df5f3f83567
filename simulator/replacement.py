"""Re-placement at run time: learn a new placement from the routes just seen, move the weights, go on; does it pay?

Every `every_steps` steps predictor and placement are fitted anew on the rows that were processed since the last time (all
of them seen, none to come). The experts that a rank lacks then travel once, as one all-to-all whose rows are experts; the
part that is not overlapped stalls the next step. Fitting itself runs beside the steps and costs them nothing.

Homes follow the new placement: in attention-TP every token's, in attention-DP those of requests that have not started
(requests that wait in a served run too). A running request stays where its KV cache lies. A placement equal to the one in
force moves nobody.

Gain = what the same run takes without re-placement, under the first placement with homes of its own, less what it takes
with it. Fixed batches are priced both ways, step by step. A served run is simulated twice, because other times form other
batches: the same arrivals and routes without re-placement, and request by request the two are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from semmoe.heads import Heads
from semmoe.migration import aligned, moved_experts_LGG
from semmoe.recipe import learn
from semmoe.run import Run
from semmoe.serving import ServingLoop, StepPlan, TokenRows
from semmoe.trace import RoutingTrace
from semmoe.traffic import Traffic
from semmoe.traffic.collective import Collective

from .cost.attention import AttentionLoad
from .cost.model import CostModel
from .engine import simulate_serving
from .layer import LayerTimes, time_layers
from .step_timer import StepTimer
from .traffic_source import TracedTraffic, TrafficSource


@dataclass(frozen=True)
class Replacing:
    """Settings of config group `replacement` (values checked there); every_steps 0: never."""

    every_steps: int = 0
    overlap: float = 0.0


class ReplacingTimer(StepTimer):
    """A StepTimer whose placement changes on the way. See the module. loop: of a served run, whose requests it re-homes."""

    def __init__(self, run: Run, cost: CostModel, settings: Replacing, full_model: bool) -> None:
        super().__init__(run.planner(), cost, run.meter(), full_model, barrier_each_layer=run.kind == "batches")
        self.form = run.batch_form if run.kind == "batches" else self.form
        self.of, self.recipe, self.fitted = run, run.recipe, run.fitted
        self.trace, self.settings = run.heldout, settings
        self.heads: Heads | None = run.heads if run.kind == "batches" else None
        self.loop: ServingLoop | None = None
        self.first: TrafficSource = TracedTraffic(run.planner(), cost.spec, cost.network.wiring)
        self._can_run_ahead = False
        self.stalls_ms: list[float] = []
        self.gains_ms: list[float] = []  # of fixed batches, a later step each, stalls apart
        self.node_bytes = self.nic_bytes = 0.0
        self._seen: list[NDArray[np.int64]] = []
        self._started_R = np.zeros(self.trace.num_requests, dtype=bool)
        self._later_steps = 0
        self._served: dict[str, float | None] = {}

    def run(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> Traffic:
        """queue_T and load are those of the run without re-placement."""
        due = len(self._seen) >= self.settings.every_steps
        stall_ms = self._replace() if due else 0.0
        homes_T, own_load = queue_T, load
        if self.heads is not None:
            homes_T = self.heads.home_T[rows_T]
            own_load = self.batch_load(len(rows_T), homes_T)
            self._started_R[self.trace.request_T[rows_T]] = True
        traffic = super().run(rows_T, homes_T, own_load)
        self._seen.append(rows_T)
        times = self.timeline.steps[-1]
        self._later_steps += bool(self.stalls_ms)
        if self.stalls_ms and self.loop is None:
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
        """Fit on what was seen, move, re-home, and return the stall in milliseconds."""
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
        if (old.rank_mask_LEG != placement.rank_mask_LEG).any():
            self._rehome()
        self._seen = []
        return self.stalls_ms[-1]

    def _rehome(self) -> None:
        """Homes of requests that have not started, under the placement in force (attention-DP)."""
        if self.loop is not None and self.loop.scheduler is not None:
            learn(self.loop.scheduler, self.fitted)
            self.loop.reschedule(*self.of.knowledge(self.fitted, self.loop.scheduler))
        waiting = np.flatnonzero(~self._started_R)
        if self.heads is not None and len(waiting):
            rank_R = self.heads.rank_R.copy()
            trace = self.trace.select(waiting)
            rank_R[waiting] = self.recipe.request_ranks(self.fitted, trace, self.heads.head_tokens)
            self.heads = replace(self.heads, rank_R=rank_R)

    def _first_step_ms(
        self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None, load: AttentionLoad | None
    ) -> float:
        traffic = self.first.of_rows(rows_T, queue_T)
        return time_layers(self.cost, traffic, load, self.barrier_each_layer).step_ms

    def compare(self, without: ServingLoop) -> None:
        """Take the gains of a finished served run from the same service without re-placement."""
        assert self.loop is not None
        earlier_ms_R = without.finish_ms_R - self.loop.finish_ms_R
        decoding = self.loop.output_R > 1
        spans = [(loop.finish_ms_R - loop.first_token_ms_R)[decoding] for loop in (without, self.loop)]
        tpot_ms_R = (spans[0] - spans[1]) / (self.loop.output_R[decoding] - 1)
        self._served = {
            "replacement_net_ms": float(without.finish_ms_R.max() - self.loop.finish_ms_R.max()),
            "replacement_e2e_gain_ms": float(earlier_ms_R.mean()),
            "replacement_tpot_gain_ms": float(tpot_ms_R.mean()) if decoding.any() else None,
        }

    def columns(self) -> dict[str, float | int | None]:
        """Columns of the row: what moved, what it cost, what it gained."""
        stall_ms = float(np.sum(self.stalls_ms))
        net_ms = self._served.get("replacement_net_ms", float(np.sum(self.gains_ms)) - stall_ms)
        assert net_ms is not None
        gain_ms = (net_ms + stall_ms) / self._later_steps if self._later_steps else None
        pays = gain_ms is not None and gain_ms > 0
        return {
            "replacements": len(self.stalls_ms),
            "migration_node_bytes": self.node_bytes,
            "migration_nic_bytes": self.nic_bytes,
            "replacement_stall_ms": stall_ms,
            "replacement_gain_ms": gain_ms,
            "replacement_net_ms": net_ms,
            "break_even_steps": stall_ms / len(self.stalls_ms) / gain_ms if pays and gain_ms else None,
            **self._served,
        }


def loop_for(run: Run, timer: StepTimer) -> ServingLoop:
    """The loop of a served run, whose requests a timer that re-places re-homes."""
    loop = run.serving_loop()
    if isinstance(timer, ReplacingTimer):
        timer.loop = loop
    return loop


def simulate_without(run: Run, timer: ReplacingTimer, show: bool = False) -> ServingLoop:
    """The finished loop of the same served run without re-placement."""
    loop = run.serving_loop()
    plain = StepTimer(run.planner(), timer.cost, run.meter(), timer.full_model)
    simulate_serving(loop, plain, show)
    return loop


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
