"""The MoE layer is lossless in every flow, with every dispatcher and placement, on every transport, and its counted
Traffic is that of the routes (each case checks both)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from layer_cases import EXPERTS, TOP_K, Case, CaseWeights, check_case, make_data, relative_error, run_case, run_cases
from rank_processes import rank_processes

from harness.layer import Routes, build_layers
from harness.reference.experts import moe_reference
from harness.reference.gate import Gating
from harness.transport.virtual import run_virtual
from semmoe.dispatch import valid_pairs
from semmoe.errors import UserError
from semmoe.replica_router import Local

PAIRS = valid_pairs()
PLACEMENTS = ("contiguous", "random", "replicas")
FP32, BF16, FP8 = 1e-5, 2e-2, 5e-2  # fp8 e4m3 keeps 3 bits of mantissa: 2^-4 a value at worst, less in the norm


@pytest.fixture(autouse=True, scope="module")
def one_thread():  # type: ignore[no-untyped-def]
    """Virtual ranks are threads already; more threads inside each only get into each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def process_cases() -> list[Case]:
    """Every pair with every number of tokens, placements and homes taken in turn; then bf16 and the options."""
    turns = itertools.cycle(itertools.product(PLACEMENTS, ("spread", "one", "ends", "spread")))
    cases = []
    for (flow, dispatcher), tokens in itertools.product(PAIRS, (0, 1, 7, 64)):
        placement, homes = next(turns)
        cases.append(Case(flow, dispatcher, placement, tokens, homes, carry=flow == "tp_shuffled"))
    for flow, dispatcher in PAIRS:
        cases.append(Case(flow, dispatcher, "random", 64, dtype="bf16", residual=flow != "dp"))
    return cases


def tolerance_of(case: Case) -> float:
    return FP8 if case.dispatch_dtype == "fp8" else {"fp32": FP32, "bf16": BF16}[case.dtype]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("transport", ["collective", "shared"])
def test_real_processes_give_the_reference_and_its_traffic(transport: str, ranks: int) -> None:
    cases = process_cases()
    results = rank_processes().run(run_cases, transport, ranks, cases)
    for i, case in enumerate(cases):
        check_case(case, ranks, [results[rank][i] for rank in range(ranks)], tolerance_of(case))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("flow", "dispatcher"), PAIRS)
def test_virtual_ranks_give_the_reference_and_its_traffic(flow: str, dispatcher: str | None, placement: str) -> None:
    for tokens, homes in ((0, "spread"), (1, "spread"), (7, "one"), (64, "spread"), (64, "one"), (64, "ends")):
        case = Case(flow, dispatcher, placement, tokens, homes, seed=3)
        check_case(case, 4, run_virtual(4, lambda t, case=case: run_case(t, case)), FP32)


@pytest.mark.parametrize("flow", ["dp", "tp_scattered", "tp_shuffled"])
def test_low_latency_keeps_its_stated_tolerance_in_fp8_and_the_usual_one_in_bf16(flow: str) -> None:
    case = Case(flow, "low_latency", dtype="bf16", hidden=160)  # a full block of 128 and a short one
    for dispatch_dtype, tolerance in (("fp8", FP8), ("bf16", BF16)):
        one = replace(case, dispatch_dtype=dispatch_dtype)
        check_case(one, 4, run_virtual(4, lambda t, one=one: run_case(t, one)), tolerance)
    coarse = replace(case, dispatch_dtype="fp8")
    with pytest.raises(AssertionError, match="layer 0"):  # so fp8 really was in the way
        check_case(coarse, 4, run_virtual(4, lambda t: run_case(t, coarse)), FP8 / 10)


def test_the_oracle_notices_a_wrong_route() -> None:
    case = Case("dp", "a2a_dedup")
    results = run_virtual(4, lambda t: run_case(t, replace(case, seed=1)))
    with pytest.raises(AssertionError):
        check_case(case, 4, results, FP32)


def free_gate(transport, case: Case, gating: Gating, routes_forced: bool | None):  # type: ignore[no-untyped-def]
    """Outputs and flips of layer 0 in tp_replicated (every rank sees every token), routed by the layer's own gate."""
    data = make_data(case, transport.ranks)
    (layer,) = build_layers(
        transport, case.spec, data.placement, CaseWeights(), gating, router=Local(), max_tokens=64, layers=[0]
    )
    routes = None
    if routes_forced is not None:
        routes = Routes(torch.from_numpy(data.slots_TLk[:, 0]), None, routes_forced)
    return layer.forward(data.parts_GTH[transport.rank], routes), layer.gate.permuted


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("grouped", [False, True])
def test_the_gate_of_every_placement_chooses_the_logical_experts(placement: str, grouped: bool) -> None:
    gating = Gating(top_k=TOP_K, n_group=4, topk_group=2) if grouped else Gating(top_k=TOP_K)
    case = Case("tp_replicated", None, placement)
    outputs = run_virtual(4, lambda t: free_gate(t, case, gating, None))
    data, source = make_data(case, 4), CaseWeights()
    score_TE = gating.scores(data.x_TH @ source.gate_EH(0).T)
    experts_Tk = gating.choose(score_TE)
    pairs = [source.expert(0, e) for e in range(EXPERTS)]
    w13, w2 = (torch.stack([p[i] for p in pairs]) for i in range(2))
    expected = moe_reference(data.x_TH, experts_Tk, gating.weights(score_TE, experts_Tk), w13, w2)
    for output, permuted in outputs:
        assert relative_error(output.y, expected) < FP32
        assert permuted == (placement != "replicas" and not grouped)


@pytest.mark.parametrize("placement", ["random", "replicas"])
def test_route_flips_count_the_choices_that_the_gate_would_not_make(placement: str) -> None:
    case = Case("tp_replicated", None, placement)
    gating = Gating(top_k=TOP_K)
    data = make_data(case, 4)
    own_Tk = gating.choose(data.x_TH @ CaseWeights().gate_EH(0).T).numpy()
    expected = sum(len(set(a) - set(b)) for a, b in zip(data.experts_TLk[:, 0].tolist(), own_Tk.tolist(), strict=True))
    assert expected > 0
    for forced in (True, False):
        outputs = run_virtual(4, lambda t, forced=forced: free_gate(t, case, gating, forced))
        assert [output.route_flips for output, _ in outputs] == [expected] * 4


def test_forced_routes_without_weights_take_those_of_the_gate() -> None:
    case = Case("tp_replicated", None, "replicas")
    gating = Gating(top_k=TOP_K, renormalise=False)
    outputs = run_virtual(4, lambda t: free_gate(t, case, gating, True))
    data, source = make_data(case, 4), CaseWeights()
    experts_Tk = torch.from_numpy(data.experts_TLk[:, 0])
    weights_Tk = (data.x_TH @ source.gate_EH(0).T).softmax(-1).gather(1, experts_Tk)
    pairs = [source.expert(0, e) for e in range(EXPERTS)]
    w13, w2 = (torch.stack([p[i] for p in pairs]) for i in range(2))
    assert relative_error(outputs[0][0].y, moe_reference(data.x_TH, experts_Tk, weights_Tk, w13, w2)) < FP32


def test_phases_are_timed_in_every_layer() -> None:
    case = Case("tp_shuffled", "a2a_dedup")

    def body(transport):  # type: ignore[no-untyped-def]
        data = make_data(case, transport.ranks)
        layers = build_layers(transport, case.spec, data.placement, CaseWeights(), Gating(top_k=TOP_K))
        for layer in layers:
            layer.forward(data.parts_GTH[transport.rank], None, data.homes_TL[:, layer.layer])
        return layers[0].timer.laps_ns

    for laps_ns in run_virtual(2, body):
        assert len(laps_ns) == 2
        assert all(ns > 0 for lap in laps_ns for ns in lap.values())


def test_bad_input_is_refused_with_what_would_be_right() -> None:
    def low_latency(transport):  # type: ignore[no-untyped-def]
        case = Case("dp", "low_latency")
        data = make_data(case, transport.ranks)
        (layer,) = build_layers(
            transport, case.spec, data.placement, CaseWeights(), Gating(top_k=TOP_K), max_tokens=1, layers=[0]
        )
        return layer.forward(data.x_TH)

    with pytest.raises(UserError, match="raise max_tokens, or use a2a_dedup"):
        run_virtual(2, low_latency)

    def no_router(transport):  # type: ignore[no-untyped-def]
        case = Case("dp", "a2a_dedup", "replicas")
        data = make_data(case, transport.ranks)
        build_layers(transport, case.spec, data.placement, CaseWeights(), Gating(top_k=TOP_K))[0].forward(data.x_TH)

    with pytest.raises(UserError, match="need a replica router"):
        run_virtual(2, no_router)

    def other_hidden(transport):  # type: ignore[no-untyped-def]
        case = Case("dp", "a2a_dedup")
        data = make_data(case, transport.ranks)
        build_layers(transport, case.spec, data.placement, CaseWeights(32), Gating(top_k=TOP_K))

    with pytest.raises(UserError, match="hidden=32 with a dispatch spec of hidden=16"):
        run_virtual(2, other_hidden)
