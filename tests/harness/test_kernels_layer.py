"""Whole MoE layers over the kernels (homes, ranking, SRS, dispatch, experts, combine, SAG with ids), in the interpreter:
equal to the reference in one process, and counting what the routes say."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import kernel_cases_layer
import torch
from kernel_cases import on_rank_zero
from layer_cases import Case, check_case, make_data, oracle, relative_error, run_cases
from rank_processes import rank_processes

FP32 = 1e-5


def pulled(case: Case) -> bool:
    return case.dispatcher in ("a2a_assignment", "a2a_dedup")


def virtual(ranks: int, cases: list[Case]) -> None:
    results = rank_processes().run(on_rank_zero, kernel_cases_layer.virtual_layers, (ranks, cases))[0]
    for case, by_rank in zip(cases, results, strict=True):
        check_case(case, ranks, by_rank, FP32, routes_first=pulled(case))


def test_virtual_ranks_run_every_flow_and_dispatcher_by_kernels() -> None:
    cases = [
        Case("tp_shuffled", "a2a_dedup", "random", 5, "spread", residual=True, carry=True),
        Case("tp_shuffled", "a2a_assignment", "replicas", 6, "ends", carry=True),
        Case("tp_scattered", "a2a_dedup", "random", 5, "one"),
        Case("dp", "a2a_assignment", "random", 5),
        Case("dp", "low_latency", "random", 4, dispatch_dtype="fp32"),
        Case("tp_replicated", None, "random", 4),
        Case("dp", "a2a_dedup", "random", 0),
    ]
    virtual(4, cases)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fewer_ranks_do_the_same(ranks: int) -> None:
    homes = "spread"
    virtual(
        ranks, [Case("tp_shuffled", name, "random", 6, homes, carry=True) for name in ("a2a_dedup", "a2a_assignment")]
    )


@pytest.mark.parametrize("dispatcher", ["a2a_dedup", "a2a_assignment"])
def test_two_processes_exchange_by_kernels_that_wait_for_each_other(dispatcher: str) -> None:
    cases = [Case("tp_shuffled", dispatcher, "random", n, "spread", carry=True) for n in (0, 7)]
    results = rank_processes().run(run_cases, "shared_fused", 2, cases)
    for i, case in enumerate(cases):
        check_case(case, 2, [results[rank][i] for rank in range(2)], FP32, routes_first=True)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_layer_assigns_homes_from_scores_as_the_reference_does(kernels: str) -> None:
    case = Case("tp_shuffled", "a2a_dedup", "random", 9)
    results = rank_processes().run(on_rank_zero, kernel_cases_layer.homes_on_the_device, (case, 2, kernels))[0]
    expected_TH = oracle(case, make_data(case, 2), 0)
    for y, _ in results:
        assert relative_error(y, expected_TH) < FP32


def test_the_oracle_sees_a_wrong_weight() -> None:
    """Negative control: outputs of other weights than those asked for."""
    case = Case("dp", "a2a_dedup", "random", 7, seed=1)
    results = rank_processes().run(on_rank_zero, kernel_cases_layer.virtual_layers, (2, [case]))[0][0]
    with pytest.raises(AssertionError):
        check_case(Case("dp", "a2a_dedup", "random", 7), 2, results, FP32, routes_first=True)
    assert isinstance(results[0][0][0], torch.Tensor)
