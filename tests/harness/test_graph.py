"""Captured layers without a GPU: the phases that a graph would hold, replayed from fixed buffers under a guard that fails on
any read of the device, in the interpreter. Capture itself needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from dataclasses import replace

import graph_cases
import numpy as np
import torch
from graph_cases import process_captured, virtual_captured
from kernel_cases import on_rank_zero
from layer_cases import (
    DTYPES,
    EXPERTS,
    TOP_K,
    Case,
    CaseWeights,
    make_data,
    relative_error,
)
from rank_processes import rank_processes

from harness.counting import traffic_of
from harness.device.fixed import bucket
from harness.device.graph import graph_column
from harness.reference.experts import moe_reference
from harness.reference.gate import Gating
from semmoe.errors import UserError
from semmoe.traffic import Traffic, count_traffic, differences
from tests.harness.measure_kit import build

FP32 = 1e-5
SHUFFLED = Case("tp_shuffled", "a2a_dedup", "contiguous", 9, carry=True)
FOUR = [  # ranks without a token, all tokens on one, replicas
    (Case("dp", "a2a_assignment", "replicas", 6, "ends"), None),
    (Case("tp_scattered", "a2a_dedup", "random", 5, "one"), None),
    (replace(SHUFFLED, seed=1), SHUFFLED),  # captured with other tokens, homes and routes
]
TWO = [
    (Case("dp", "a2a_dedup", "random", 5), None),
    (Case("dp", "allgather_rs", "random", 5, "one"), None),
    (Case("tp_shuffled", "a2a_assignment", "random", 5, carry=True), None),
    (Case("tp_replicated", None, "random", 5), None),
]


def check(case: Case, ranks: int, results: list[Any]) -> None:
    """Outputs are the reference's with the gate's weights, counts those of the routes, ids carried."""
    data, source = make_data(case, ranks), CaseWeights(case.hidden)
    experts_Tk = torch.from_numpy(data.experts_TLk[:, 0])
    gating = Gating(top_k=TOP_K)
    weights_Tk = gating.weights(gating.scores(data.x_TH @ source.gate_EH(0).T), experts_Tk)
    pairs = [source.expert(0, e) for e in range(EXPERTS)]
    w13, w2 = (torch.stack([p[i] for p in pairs]) for i in range(2))
    want_TH = moe_reference(data.x_TH, experts_Tk, weights_Tk, w13, w2)
    for rank, (y, _, carried) in enumerate(results):
        own = data.homes_TL[:, 0] == rank if case.flow == "dp" and data.homes_TL is not None else slice(None)
        assert y.dtype == DTYPES[case.dtype]
        assert relative_error(y, want_TH[own]) < FP32, (case, rank)
        assert not case.carry or (carried.numpy() == data.slots_TLk[:, 0]).all()
    first = traffic_of([counter for _, counter, _ in results])
    assert differences(first, first_layer(case, ranks)) == []


def first_layer(case: Case, ranks: int) -> Traffic:
    """Of the routes; the exchange by kernels sends all of a token's slots and weights ahead."""
    data = make_data(case, ranks)
    homes_TL = None if data.homes_TL is None else data.homes_TL[:, :1]
    shape = (data.placement.num_slots, ranks, case.spec)
    counted = count_traffic(data.slots_TLk[:, :1].astype(np.int32), homes_TL, *shape)
    if case.dispatcher in ("a2a_dedup", "a2a_assignment"):
        return replace(counted, metadata_bytes=float(case.tokens * (ranks - 1) * 8 * TOP_K))
    return counted


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_virtual_ranks_replay_every_flow_from_fixed_buffers_without_reading_the_device(ranks: int, cases: Any) -> None:
    results = rank_processes().run(on_rank_zero, virtual_captured, (ranks, cases))[0]
    for (case, again), by_rank in zip(cases, results, strict=True):
        check(again or case, ranks, by_rank)


def test_two_processes_replay_with_barriers_inside_the_kernels() -> None:
    cases = [TWO[1], FOUR[2]]
    results = rank_processes().run(process_captured, 2, cases)
    for i, (case, again) in enumerate(cases):
        check(again or case, 2, [results[rank][i] for rank in range(2)])


def test_a_measured_run_is_checked_after_replay_and_counts_what_the_routes_say() -> None:
    """`measure_batches` on a GraphStack; one layer of four experts, as the interpreter is slow."""
    run = build(
        "transport=virtual", "transport.kernels=triton", "measure.cuda_graph=on", "flow=tp_shuffled", "token_scheduler=none",
        "measure.warmup=0", "workload.batch_tokens=5", "trace=synthetic", "trace.requests=8", "trace.prompt_len=4",
        "trace.output_len=4", "trace.groups=2", "trace.topics=2", "model.num_layers=1", "model.layer_ids=[0]",
        "model.num_experts=4", "model.top_k=2", "model.hidden=32", "model.expert_ffn=16",
    )  # fmt: skip
    records, captures = rank_processes().run(on_rank_zero, graph_cases.measured_by_replays, (run, False))[0]
    planner, meter, counted = run.planner(), run.meter(), run.meter()
    for step, (rows_T, queue_T) in enumerate(run.batch_steps()):
        routed = planner.route(rows_T, queue_T)
        meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, run.recipe.slots, run.ep_size, run.spec))
        counted.add(traffic_of([record.counters_S[step] for record in records]))
    assert counted.columns()["lar"] == meter.columns()["lar"] and records[0].output_error < FP32
    assert captures == 2, "the layer on both ranks, once for both batches"
    assert min(records[0].step_ns_S) > 0 and len(records[0].step_ns_S) == 2
    said, _ = rank_processes().run(on_rank_zero, graph_cases.measured_by_replays, (run, True))[0]
    assert "differs from the single-process reference" in said and "nothing was timed" in said


def test_homes_planned_inside_the_replay_are_the_hosts() -> None:
    """Three layers, so that scores follow from the ids that two earlier replays carried; a second batch by other replays."""
    run = build(
        "transport=virtual", "transport.kernels=triton", "measure.cuda_graph=on", "flow=tp_shuffled", "placement=random",
        "token_scheduler=priced", "measure.plan=device", "predictor=paper", "measure.warmup=0",
        "workload.batch_tokens=6", "trace=synthetic", "trace.requests=8", "trace.prompt_len=4", "trace.output_len=4",
        "trace.groups=2", "trace.topics=2", "model.num_layers=3", "model.layer_ids=[0,1,2]", "model.num_experts=8",
        "model.top_k=2", "model.hidden=32", "model.expert_ffn=16",
    )  # fmt: skip
    records, captures = rank_processes().run(on_rank_zero, graph_cases.measured_by_replays, (run, False))[0]
    planner, shape = run.planner(), (run.recipe.slots, run.ep_size, run.spec)
    for step, (rows_T, queue_T) in enumerate(run.batch_steps()):
        routed = planner.route(rows_T, queue_T)
        found = differences(
            traffic_of([record.counters_S[step] for record in records]),
            count_traffic(routed.slots_TLk, routed.homes_TL, *shape),
        )
        assert [line for line in found if not line.startswith("metadata_bytes")] == []
    assert captures == 6 and records[0].output_error < FP32


def test_the_guard_sees_every_kind_of_read() -> None:
    seen = rank_processes().run(on_rank_zero, graph_cases.reads_are_seen, ())[0]
    assert (
        "item reads the device on the host" in seen
        and "__getitem__ with a boolean mask: its size is read on the host" in seen
    )


def test_an_output_that_is_not_written_shows() -> None:
    """Negative control: a replay without its last phase."""
    (results,) = rank_processes().run(on_rank_zero, virtual_captured, (2, TWO[:1], True))[0]
    with pytest.raises(AssertionError):
        check(TWO[0][0], 2, results)
    assert all(y.isnan().all() for y, _, _ in results)


def test_places_are_few_and_at_most_an_eighth_too_many() -> None:
    made = [bucket(n) for n in range(1, 4097)]
    assert all(n <= b <= max(n * 9 / 8, n) for n, b in enumerate(made, 1)) and len(set(made)) < 90
    assert (bucket(0), bucket(15), bucket(33), made == sorted(made)) == (1, 15, 36, True)


def test_why_a_layer_runs_eagerly_is_said_and_asking_for_a_graph_there_is_an_error() -> None:
    gpu = torch.device("cuda", 0)
    able = ("transport=virtual", "transport.kernels=triton", "measure.cuda_graph=on")
    assert graph_column(build(*able), gpu) == "on"
    assert graph_column(build(*able, "flow=tp_replicated", "dispatcher=none"), gpu) == "on"
    assert graph_column(build("measure.cuda_graph=off"), gpu) == "off: asked"
    for words, *overrides in (
        ("CPU tensors",),
        ("reads the sizes of its exchanges on the host", "transport=collective"),
        ("transport.kernels=torch reads counts on the host", "transport=virtual"),
        ("steps of a served run differ in shape", *able[:2], "workload=serve"),
        ("low_latency reads the number of rows", *able[:2], "dispatcher=low_latency"),
        ("rows of several types", *able[:2], "dtype=bf16", "+dispatcher.combine_dtype=fp8"),
    ):
        device = gpu if overrides else torch.device("cpu")
        assert words in graph_column(build(*overrides), device)
        with pytest.raises(UserError, match=r"measure.cuda_graph=on: .*set measure.cuda_graph=auto"):
            graph_column(build(*overrides, "measure.cuda_graph=on"), device)
    with pytest.raises(UserError, match="did you mean 'auto'"):
        graph_column(build("measure.cuda_graph=aut"), gpu)
