"""Speed of a served simulation: requests per second of CPU time with per-token routing in all layers and with expected
traffic, a decode step, and simulated over real time.

    make bench      or      python -m pytest tests/benchmarks/test_simulation_speed.py --benchmark-enable

deepseek-v2-lite and qwen3-30b-a3b on h100x8, attention-DP, a2a_dedup, 1,000 requests x (256 in + 64 out) tokens, full
model, offered close to what the eight ranks can take. The trace is synthetic (uniform routes) and is made before the
clock starts. CPU time of the process, which runs one thread: wall-clock on an idle machine, and fair on a busy one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.plugins import instantiate
from semmoe.schedule.shortest_queue import ShortestQueue
from semmoe.serving import Request, ServingLimits, ServingLoop
from semmoe.serving.workload import Workload
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.trace import RoutingTrace
from semmoe.traffic.locality import LocalityMeter
from simulator.cost.model import CostModel
from simulator.engine import simulate_serving
from simulator.step_timer import StepTimer, Timeline
from simulator.traffic_source import ExpectedTraffic

CONF = Path(__file__).resolve().parents[2] / "conf"
REQUESTS, PROMPT, OUTPUT, RANKS = 1000, 256, 64, 8
EXPECTED_BAR_RPS = 5000.0  # with routing=expected
DECODES = 200
# model: (bar in simulated requests a second, offered requests a second: a little over what the machine finishes)
CASES = {"deepseek-v2-lite": (2000.0, 650.0), "qwen3-30b-a3b": (1000.0, 450.0)}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    return instantiate(yaml.safe_load((CONF / "model" / f"{request.param}.yaml").read_text()), "model")


@pytest.fixture(scope="module")
def workload(model: ModelSpec) -> Workload:
    """Every request has routes of its own: 320,000 tokens in every layer."""
    rng = np.random.default_rng(0)
    length, layers = PROMPT + OUTPUT, model.num_moe_layers
    tokens = REQUESTS * length
    # top_k distinct experts: a random start and an odd stride, cheap to draw and even over experts
    count, size = model.num_experts, (tokens, layers, 1)
    start = rng.integers(0, count, size, dtype=np.int16)
    stride = 2 * rng.integers(0, count // 2, size, dtype=np.int16) + 1
    experts = (start + stride * np.arange(model.top_k, dtype=np.int16)) % np.int16(count)
    trace = RoutingTrace(
        model=model.name,
        num_experts=model.num_experts,
        vocab_size=model.vocab_size,
        experts_TLk=experts,
        token_id_T=rng.integers(0, model.vocab_size, tokens),
        request_offset_R1=np.arange(REQUESTS + 1) * length,
        prompt_len_R=np.full(REQUESTS, PROMPT),
        domain_R=np.array(["synthetic"] * REQUESTS),
        layer_ids_L=np.array(model.layer_ids),
    )
    return Workload.sample(trace, REQUESTS, "poisson", CASES[model.name][1], max_output=OUTPUT, seed=0)


class Machine:
    """One model on h100x8 and what a run over a workload needs."""

    def __init__(self, model: ModelSpec, trace: RoutingTrace, routing: str = "traced") -> None:
        self.model, self.trace = model, trace
        self.cluster = ClusterSpec.from_dict(yaml.safe_load((CONF / "cluster" / "h100x8.yaml").read_text()))
        experts_LP = np.tile(np.arange(model.num_experts, dtype=np.int32), (model.num_moe_layers, 1))
        self.placement = Placement(experts_LP, RANKS, model.layer_ids, model.num_experts)
        self.spec = DispatchSpec(flow="dp", dispatcher="a2a_dedup", hidden=model.hidden, top_k=model.top_k)
        self.source = None
        if routing == "expected":
            train = trace.select(np.arange(0, trace.num_requests, 10))
            planner = StepPlanner(train, self.placement, self.spec)
            wiring = CostModel(model, self.cluster, self.spec, RANKS).network.wiring
            self.source = ExpectedTraffic(planner, np.arange(train.num_requests) % RANKS, wiring)

    def timer(self) -> StepTimer:
        cost = CostModel(self.model, self.cluster, self.spec, RANKS)
        meter = LocalityMeter(self.model.num_moe_layers, RANKS)
        planner = StepPlanner(self.trace, self.placement, self.spec)
        return StepTimer(planner, cost, meter, full_model=True, source=self.source)

    def serve(self, requests: list[Request]) -> tuple[Timeline, ServingLoop]:
        loop = ServingLoop(requests, RANKS, ServingLimits(), ShortestQueue())
        return simulate_serving(loop, self.timer()), loop


@pytest.mark.parametrize("routing", ["traced", "expected"])
@pytest.mark.benchmark(timer=time.process_time)
def test_served_requests_a_second(benchmark, model, workload, routing):
    machine = Machine(model, workload.trace, routing)
    timeline, loop = benchmark.pedantic(machine.serve, (workload.requests,), rounds=5, warmup_rounds=1)
    assert loop.done and timeline.meter.tokens == REQUESTS * (PROMPT + OUTPUT - 1)
    finished_rps = REQUESTS / (timeline.end_ms - workload.requests[0].arrival_ms) * 1e3
    if benchmark.stats is not None:  # None with --benchmark-disable: then this is a test of the path alone
        rps = REQUESTS / benchmark.stats.stats.min
        bar = EXPECTED_BAR_RPS if routing == "expected" else CASES[model.name][0]
        benchmark.extra_info |= {
            "requests_per_s": rps,
            "requests_per_s_median": REQUESTS / benchmark.stats.stats.median,
            "steps": loop.steps,
            "us_per_step": benchmark.stats.stats.min / loop.steps * 1e6,
            "simulated_requests_per_s": finished_rps,
            "bar_requests_per_s": bar,
        }
        print(
            f"\n{routing}: {rps:.0f} requests/s (bar {bar:.0f}), {loop.steps} steps; machine {finished_rps:.0f} requests/s"
        )


@pytest.mark.benchmark(timer=time.process_time)
def test_decode_step(benchmark, model, workload):
    """Plan, route, count, price and complete a step of 256 running requests, over 200 steps of the engine. Bar: 100 us
    for deepseek-v2-lite."""
    offset_R1 = workload.trace.request_offset_R1
    requests = [Request(r, 0.0, 16, DECODES, int(offset_R1[r])) for r in range(256)]
    timeline, loop = benchmark.pedantic(Machine(model, workload.trace).serve, (requests,), rounds=5, warmup_rounds=1)
    assert timeline.meter.tokens == 256 * (15 + DECODES) and all(
        p.phase_N.all() for p in timeline.plans[-DECODES + 1 :]
    )
    if benchmark.stats is not None:
        benchmark.extra_info["us_per_step"] = best = 1e6 * benchmark.stats.stats.min / loop.steps
        print(f"\n{model.name}: {best:.0f} us a decode step of 256 requests ({loop.steps} steps)")


@pytest.mark.benchmark(timer=time.process_time)
def test_real_time_at_five_requests_a_second(benchmark, model, workload):
    """Simulated over spent seconds. Bar: 100."""
    requests = [replace(r, arrival_ms=200.0 * r.id) for r in workload.requests[:50]]
    timeline, _ = benchmark.pedantic(Machine(model, workload.trace).serve, (requests,), rounds=3, warmup_rounds=1)
    assert timeline.end_ms > 9_800
    if benchmark.stats is not None:
        benchmark.extra_info["times_real_time"] = times = timeline.end_ms / 1e3 / benchmark.stats.stats.min
        print(f"\n{model.name}: {times:.0f} x real time at 5 requests/s, {len(timeline.steps)} steps")
