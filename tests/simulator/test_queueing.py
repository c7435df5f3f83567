"""Queueing theory holds in the simulation: M/D/1 on a degenerate machine, Little's law on real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from composed_runs import build
from conftest import make_trace
from simulator_kit import ConstantTimer, cluster, timer_for, toy_model

from semmoe.builder import RunBuilder
from semmoe.schedule.round_robin import RoundRobin
from semmoe.serving import Request, ServingLimits, ServingLoop
from semmoe.serving.workload import Workload
from simulator.app import step_timer
from simulator.disaggregated import Disaggregated, simulate_disaggregated
from simulator.engine import simulate_serving
from simulator.kv_link import KvLink


def mean_wait(wait_ms: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, from the independent cycles between customers who find the system empty (ratio
    estimator: sum of waits over number of customers)."""
    starts = np.flatnonzero(wait_ms < 1e-9)
    totals, sizes = np.add.reduceat(wait_ms, starts), np.diff(np.append(starts, len(wait_ms)))
    mean = totals.sum() / sizes.sum()
    return float(mean), float(np.sqrt(((totals - mean * sizes) ** 2).sum()) / sizes.sum())


def pollaczek_khinchine(load: float, service_ms: float) -> float:
    return load * service_ms / (2 * (1 - load))


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_composed_service_of_one_rank_and_one_token_a_request_waits_as_an_m_d_1_queue(load):
    """Planner, traffic, cost model, loop and arrivals as `semmoe simulate` puts them together."""
    overrides = ("planned_folds=0", "cluster=h100x8", "ep_size=1", "scope=full_model", "workload=serve")
    overrides += ("workload.max_prompt=1", "workload.max_output=1", "serving.max_running=1", "seed=3")
    builder = RunBuilder()
    alone = build(builder, *overrides, "workload.num_requests=1")
    service_ms = simulate_serving(alone.serving_loop(), step_timer(alone)).steps[0].step_ms
    run = build(builder, *overrides, "workload.num_requests=4000", f"workload.rate_rps={1e3 * load / service_ms}")
    loop = run.serving_loop()
    times = simulate_serving(loop, step_timer(run)).phase_ms("step")
    assert np.ptp(times) < 1e-9 and len(times) == 4000, "deterministic service, one request at a time"
    mean_ms, error_ms = mean_wait(loop.finish_ms_R - loop.arrival_ms_R - service_ms)
    expected_ms = pollaczek_khinchine(load, service_ms)
    assert error_ms < 0.1 * expected_ms, "a check that could not fail"
    assert abs(mean_ms - expected_ms) < 3.5 * error_ms


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_one_request_at_a_time_waits_as_in_an_m_d_1_queue(load):
    count = 10000
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / load, count))
    requests = [Request(i, float(a), 1, 1) for i, a in enumerate(arrivals)]
    loop = ServingLoop(requests, 1, ServingLimits(1, 1, 10))
    simulate_serving(loop, ConstantTimer(1.0))  # type: ignore[arg-type]
    mean_ms, error_ms = mean_wait(loop.finish_ms_R - arrivals - 1.0)
    assert abs(mean_ms - pollaczek_khinchine(load, 1.0)) < 3.5 * error_ms
    assert mean_ms == pytest.approx(pollaczek_khinchine(load, 1.0), rel=0.08)


class Watched(ServingLoop):
    """Counts what comes into its queues and leaves them at every event, from the queues alone, never from the times of
    requests. Steps that were priced together end after requests have come in during the last of them: sorted by time."""

    held: int = 0
    changes: list[tuple[float, int]]

    def _note(self, now_ms: float) -> None:
        held = sum(len(queue.running) + len(queue.waiting) for queue in self.queues) + len(self._pending)
        self.__dict__.setdefault("changes", []).append((now_ms, held - self.held))
        self.held = held

    @property
    def events(self) -> list[tuple[float, int]]:
        now_E, change_E = np.array(sorted(self.changes)).T
        return list(zip(now_E, np.cumsum(change_E), strict=True))

    def submit(self, request: Request, now_ms: float, first_token_ms: float | None = None) -> None:
        super().submit(request, now_ms, first_token_ms)
        self._note(now_ms)

    def _end(self, request: int, end_ms: float) -> None:
        super()._end(request, end_ms)
        self._note(end_ms)

    def mean_number(self) -> float:
        """Time average of the number in the system, from the first event to the last."""
        (now_E, held_E) = np.array(self.events).T
        return float((held_E[:-1] * np.diff(now_E)).sum() / (now_E[-1] - now_E[0]))

    def arrival_rate_times_time(self, enter_ms_R: np.ndarray, leave_ms_R: np.ndarray) -> float:
        """Little's right-hand side: requests a millisecond x mean time in the system."""
        span_ms = self.events[-1][0] - self.events[0][0]
        return float(len(enter_ms_R) / span_ms * (leave_ms_R - enter_ms_R).mean())


@pytest.mark.parametrize("kv_tokens", [400, 60])
@pytest.mark.parametrize(("flow", "queues"), [("dp", 4), ("tp_shuffled", 1)])
def test_littles_law_with_real_steps_and_under_preemption(flow, queues, kv_tokens):
    """Mean number in the system = arrival rate x mean time in it, exactly: the system is empty at both ends."""
    trace = make_trace()
    requests = Workload.sample(trace, 60, "poisson", 2000.0, seed=1).requests
    loop = Watched(requests, queues, ServingLimits(32, 8, kv_tokens), RoundRobin())
    timer = timer_for(flow, "a2a_dedup", trace=trace, cluster=cluster(4, link_gbps=1e-3))
    simulate_serving(loop, timer)
    assert bool(loop.preemptions) == (kv_tokens == 60)
    right = loop.arrival_rate_times_time(loop.arrival_ms_R, loop.finish_ms_R)
    assert loop.mean_number() == pytest.approx(right, rel=1e-9) and right > 1
    late = loop.finish_ms_R.copy()
    late[0] += 1.0  # one request that is said to end a millisecond late breaks it
    assert loop.mean_number() != pytest.approx(loop.arrival_rate_times_time(loop.arrival_ms_R, late), rel=1e-9)


def test_littles_law_in_both_pools_of_a_disaggregated_service():
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1.5, 80))
    requests = [
        Request(i, float(a), int(rng.integers(1, 40)), int(rng.integers(2, 12))) for i, a in enumerate(arrivals)
    ]
    limits = ServingLimits(48, 6, 120)
    prompts = [replace(request, output_len=1) for request in requests]
    prefill, decode = (
        Watched(asked, 2, limits, RoundRobin(), hold_kv=asked is prompts) for asked in (prompts, requests)
    )
    link = KvLink(cluster(4, link_gbps=1.0), toy_model(), 2, 2)
    service = Disaggregated(requests, prefill, decode, link)
    simulate_disaggregated(service, ConstantTimer(2.0), ConstantTimer(1.0))  # type: ignore[arg-type]
    for loop, enter_ms_R in (prefill, prefill.arrival_ms_R), (decode, prefill.finish_ms_R):
        right = loop.arrival_rate_times_time(enter_ms_R, loop.finish_ms_R)
        assert loop.mean_number() == pytest.approx(right, rel=1e-9) and right > 1
