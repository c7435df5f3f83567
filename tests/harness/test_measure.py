"""Measured runs: locality counted exactly, outputs checked first, times recorded for every phase, serving in real time."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.check import TOLERANCE  # noqa: E402
from harness.measure import measure_batches, measure_run  # noqa: E402
from harness.poison import poisoned  # noqa: E402
from harness.pool import RankPool  # noqa: E402
from harness.record import RankRecord, bootstrap_mean, time_columns, times_ms  # noqa: E402
from harness.serving.serve import Clock  # noqa: E402
from harness.stack import Stack, max_home_tokens  # noqa: E402
from harness.worker import RankContext  # noqa: E402
from semmoe.errors import UserError  # noqa: E402
from semmoe.results import check_row  # noqa: E402
from semmoe.rows import locality_columns  # noqa: E402
from semmoe.run import Run  # noqa: E402
from semmoe.traffic import count_traffic  # noqa: E402
from tests.harness.measure_kit import build, write_plugins  # noqa: E402


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    write_plugins(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        with RankPool(2) as pool:
            yield pool


def expected_locality(run: Run) -> dict:
    meter, planner = run.meter(), run.planner()
    for rows_T, queue_T in run.batch_steps():
        routed = planner.route(rows_T, queue_T)
        meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, run.recipe.slots, run.ep_size, run.spec))
    return locality_columns(meter, "measured")


@pytest.mark.parametrize(
    "overrides",
    [
        ("flow=dp", "dispatcher=a2a_dedup", "measure.feed=hidden"),
        ("flow=dp", "dispatcher=low_latency", "transport=shared"),
        ("flow=dp", "dispatcher=allgather_rs", "dtype=bf16"),
        ("flow=tp_replicated", "dispatcher=none"),
        ("flow=tp_scattered", "dispatcher=a2a_assignment"),
        ("flow=tp_shuffled", "placement=semantic", "token_scheduler=semantic"),
        ("flow=dp", "placement=eplb", "placement.slots=40", "replica_router=least_loaded"),
        ("flow=dp", "~request_scheduler", "+request_scheduler={_target_: measure_plugins.AllToZero}"),
    ],
    ids=lambda o: " ".join(o),
)
def test_measured_row_is_complete_and_its_locality_is_what_the_routes_say(pool, overrides):
    run = build(*overrides)
    row, log, times = measure_run(pool, run)
    assert log is None
    shapes = {name: (len(list(run.batch_steps())), 6)[: ms.ndim] for name, ms in times.items()}
    assert {name: ms.shape for name, ms in times.items()} == shapes and {"layer", "step", "wait"} <= shapes.keys()
    checked = check_row(row)
    for name, value in check_row(row | expected_locality(run)).items():
        assert checked[name] == value, name
    assert checked["output_error"] <= TOLERANCE["fp8" if "low_latency" in " ".join(overrides) else row["dtype"]]
    assert 0 < checked["layer_ms_ci_low"] <= checked["layer_ms"] <= checked["layer_ms_ci_high"]
    assert 0 < checked["layer_ms_p10"] <= checked["layer_ms_p50"] and checked["step_ms_p10"] <= checked["step_ms_p50"]
    assert checked["flush_mb"] == 0 and "gpu_state_before" not in checked["environment"]
    assert checked["layer_ms_p50"] <= checked["layer_ms_p90"] <= checked["layer_ms_p99"]
    for phase in ("gate", "permute", "experts", *(() if run.spec.dispatcher is None else ("dispatch", "combine"))):
        assert 0 < checked[f"{phase}_ms"] < checked["layer_ms"] * 1.5, phase
        assert checked[f"{phase}_ms_p10"] <= checked[f"{phase}_ms_p50"] <= checked[f"{phase}_ms_p90"], phase
    around = run.spec.flow != "dp"
    exchanges = (*(("srs", "sag") if around else ()), *(() if run.spec.dispatcher is None else ("dispatch", "combine")))
    for phase in exchanges:
        assert 0 < checked[f"{phase}_busbw_gbps"] < 100 and checked[f"{phase}_link_share"] is None
    assert "no link speed follows" in checked["link"] and checked["link_peak_gbps"] is None
    assert ("srs_ms" in row) == around and ("sag_ms" in row) == around
    assert (checked["route_flips"] is None) == (run.cfg["measure"]["feed"] == "random")
    if run.cfg["measure"]["feed"] == "hidden":
        assert checked["route_flips"] < 0.02, "the trace was recorded from this very model"
    assert json.loads(checked["environment"])["ranks"] == 2


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_the_micro_benchmark_measures_the_local_rate_that_its_dial_asks_for(pool, rate):
    dial = ("experiment=micro", "sweep=[]", "flow=dp", "request_scheduler=oracle", f"trace.local_rate={rate}")
    run = build(*dial, "trace.requests=16", "trace.prompt_len=32")
    row, *_ = measure_run(pool, run)
    assert row["lar_measured"] == expected_locality(run)["lar_measured"] == pytest.approx(rate, abs=0.1)
    assert row["dispatch_ms"] > 0 and row["combine_ms"] > 0 and row["output_error"] < 1e-5


def test_a_rank_without_tokens_takes_part(pool):
    run = build("~request_scheduler", "+request_scheduler={_target_: measure_plugins.AllToZero}")
    record = pool.run(measure_batches, run)[1]
    assert all(counts.homes == 0 for counter in record.counters_S for counts in counter.layers)
    assert sum(counts.expert_rows for counter in record.counters_S for counts in counter.layers) > 0


def with_fault(context: RankContext, run: Run, fault: str) -> str:
    """Measure with a fault planted in the data plane of rank 1; what the rank said of it."""
    from harness import dispatchers

    original = dispatchers.AllToAll.combine

    def faulty(self, out_RH, timer):  # type: ignore[no-untyped-def]
        y_nH = original(self, out_RH, timer)
        if context.rank != 1 or fault == "none":
            return y_nH
        if fault == "scaled":
            return y_nH * 1.001
        unwritten = torch.empty_like(y_nH)
        unwritten[:-1] = y_nH[:-1]
        return unwritten

    dispatchers.AllToAll.combine = faulty  # type: ignore[method-assign]
    try:
        measure_batches(context, run)
        return "timed"
    except UserError as error:
        return str(error)
    finally:
        dispatchers.AllToAll.combine = original  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["none", "scaled", "unwritten row"])
def test_nothing_is_timed_when_the_output_is_wrong(pool, fault):
    said = pool.run(with_fault, build(), fault)
    if fault == "none":
        assert said == ["timed", "timed"]
    else:
        assert all("differs from the single-process reference" in text and "nothing was timed" in text for text in said)


def test_poisoned_memory_is_nan_in_every_float_type_and_only_inside():
    with poisoned():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.empty(1000, dtype=torch.uint8)[:996].clone().view(dtype).isnan().all()
            assert torch.empty(100, dtype=dtype).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("measure.feed=hiden",), "must be one of hidden, random"),
        (("measure.feed=hidden", "model_scale=0.5"), "set model_scale=1 or measure.feed=random"),
        (("transport.name=colective",), "did you mean 'collective'"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_right_value(overrides, words):
    with pytest.raises(UserError, match=words):
        Stack(RankContext(0, 2), build(*overrides))


def test_serving_runs_in_real_time_and_logs_what_it_did(pool):
    run = build(
        "workload=serve",
        "workload.num_requests=6",
        "workload.rate_rps=20",
        "workload.max_prompt=24",
        "workload.max_output=4",
        "serving.max_batch_tokens=32",
    )
    start = time.perf_counter()
    row, log, _ = measure_run(pool, run)
    wall_ms = (time.perf_counter() - start) * 1e3
    checked = check_row(row)
    requests = run.workload.requests
    assert log is not None and len(log.plans) == checked["steps"] > 3
    assert checked["tokens"] == sum(r.prompt_len + r.output_len - 1 for r in requests)
    assert 0 < checked["ttft_ms"] < checked["e2e_ms"] < wall_ms
    assert checked["tpot_ms"] > 0 and checked["throughput_rps"] > 0
    first_seen = {}
    for plan, now_ms in zip(log.plans, log.now_ms_S, strict=True):
        for request in plan.request_N:
            first_seen.setdefault(int(request), now_ms)
    assert all(first_seen[r.id] >= r.arrival_ms for r in requests), "nobody is served before it arrives"
    assert (np.diff(log.now_ms_S) >= log.duration_ms_S[:-1] - 1e-6).all(), "steps follow each other on one clock"
    meter, planner = run.meter(), run.planner()
    for rows_T, queue_T in log.token_rows():
        routed = planner.route(rows_T, queue_T)
        meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, run.recipe.slots, run.ep_size, run.spec))
    assert meter.columns()["lar"] == checked["lar_measured"]
    assert meter.columns()["dispatch_bytes"] == checked["dispatch_bytes"]


def test_the_clock_leaves_out_pauses():
    clock = Clock()
    time.sleep(0.02)
    now_ms = clock.now_ms()
    time.sleep(0.05)
    clock.set_back_to(now_ms)
    assert now_ms <= clock.now_ms() < now_ms + 25


def record(layer_ms_SL, gate_ms, plan_ms_S=(0.0, 0.0)) -> RankRecord:
    marks = [[[("", 0), ("gate", int(gate_ms * 1e6))] for _ in step] for step in layer_ms_SL]
    layer_ns = [[int(x * 1e6) for x in step] for step in layer_ms_SL]
    plan_ns = [int(p * 1e6) for p in plan_ms_S]
    step_ns = [sum(step) + plan for step, plan in zip(layer_ns, plan_ns, strict=True)]
    return RankRecord(0.0, None, plan_ns, step_ns, layer_ns, marks)


def test_times_are_the_slowest_rank_of_each_step_and_layer_before_any_mean():
    ranks = [record([[1.0, 4.0], [2.0, 2.0]], 0.5), record([[3.0, 1.0], [2.0, 5.0]], 1.0)]
    columns = time_columns(times_ms(ranks, planned_per_layer=False))
    assert columns["layer_ms"] == pytest.approx((3 + 4 + 2 + 5) / 4)
    assert columns["gate_ms"] == pytest.approx(1.0)
    assert columns["step_ms"] == pytest.approx((5 + 7) / 2)
    assert columns["other_ms"] == pytest.approx((2.0 + 3.0 + 1.0 + 4.0) / 4), "what no phase accounts for"
    assert "srs_ms" not in columns


def test_planning_belongs_to_the_layer_only_where_it_is_done_per_layer():
    ranks = [record([[1.0, 1.0], [1.0, 1.0]], 0.5, (2.0, 4.0))]
    outside, inside = (time_columns(times_ms(ranks, planned_per_layer=p)) for p in (False, True))
    assert outside["layer_ms"] == pytest.approx(1.0) and inside["layer_ms"] == pytest.approx(2.5)
    assert outside["plan_ms"] == inside["plan_ms"] == pytest.approx(1.5)
    assert outside["step_ms"] == inside["step_ms"] == pytest.approx(5.0)
    assert outside["other_ms"] == inside["other_ms"] == pytest.approx(0.5)


def test_bootstrap_interval_holds_the_mean_and_shrinks_with_steps():
    rng = np.random.default_rng(0)
    few, many = rng.normal(10, 1, 10), rng.normal(10, 1, 1000)
    low, high = bootstrap_mean(few, 0)
    assert low < few.mean() < high
    narrow = np.subtract(*bootstrap_mean(many, 0)[::-1])
    assert narrow < (high - low) / 3 and narrow == pytest.approx(2 * 1.96 / 1000**0.5, rel=0.25)


def test_most_tokens_at_home_bound_every_step():
    dp = build("workload.max_batches=3")
    assert max_home_tokens(dp) == max(np.bincount(q, minlength=2).max() for _, q in dp.batch_steps())
    shuffled = build("flow=tp_shuffled", "home_cap=1.5")
    assert max_home_tokens(shuffled) == 36
    assert max_home_tokens(build("workload=serve", "serving.max_batch_tokens=77")) == 77


def test_virtual_ranks_count_what_processes_count(pool):
    """transport=virtual from the configuration: threads of this process, the same Traffic and config id."""
    from harness.virtual_pool import VirtualPool

    run = build("flow=tp_shuffled", "transport=virtual")
    with VirtualPool(2) as threads:
        row, *_ = measure_run(threads, run)
    other, *_ = measure_run(pool, build("flow=tp_shuffled"))
    assert (row["transport"], row["kernel_path"], row["config_id"]) == ("virtual", "torch", other["config_id"])
    assert "2 virtual ranks on one CPU" in row["provenance"] and row["output_error"] < 1e-5
    counted = [key for key in other if key.endswith(("_measured", "_bytes")) or key.startswith("imbalance")]
    assert len(counted) > 3 and {key: row[key] for key in counted} == {key: other[key] for key in counted}


def test_cold_caches_are_asked_for_named_in_the_row_and_refused_where_they_mean_nothing(pool):
    row, *_ = measure_run(pool, build("measure.flush_mb=8"))
    warm, *_ = measure_run(pool, build())
    assert check_row(row)["flush_mb"] == 8 and row["config_id"] == warm["config_id"]
    assert row["settings_digest"] != warm["settings_digest"]
    for overrides in (("measure.flush_mb=-1",), ("measure.flush_mb=much",), ("measure.flush_mb=1", "workload=serve")):
        with pytest.raises(UserError, match="flush_mb"):
            measure_run(pool, build(*overrides))


def test_state_of_gpus_is_read_from_nvidia_smi_or_left_out(tmp_path, monkeypatch):
    from harness.environment import gpu_state

    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state() == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 580.1, 1980 MHz, 3201 MHz, 77.10 W, 31'\n")
    smi.chmod(0o755)
    (state,) = gpu_state()
    assert (state["driver_version"], state["power.draw"], state["temperature.gpu"]) == ("580.1", "77.10 W", "31")
