"""SRS and SAG kernels: their code for a GPU, and, in the interpreter in other processes, their results.

The interpreter must be chosen before a kernel is defined, so its cases run on the processes of `rank_processes`
(TRITON_INTERPRET=1), those of virtual ranks on one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import kernel_cases
from rank_processes import rank_processes

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """PTX by kernel; compiled in a process of its own without the interpreter, which another test may have chosen."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import kernel_cases; kernel_cases.print_ptx()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("sync", ["alone", "synced"])
def test_peer_rows_are_read_and_written_with_128_bits(ptx: dict[str, str], sync: str) -> None:
    for architecture in (80, 90):
        srs, sag = (ptx[f"{kernel}-{sync}-{architecture}"] for kernel in ("srs", "sag"))
        assert srs.count("ld.global.v4.b32") == 8  # one a peer: 8 warps x 32 lanes x 16 bytes = one row of 2,048 bf16
        assert sag.count("ld.global.v4.b32") == 1
        for text in (srs, sag):
            assert text.count("st.global.v4.b32") == 1
            assert "ld.global.b16" not in text and "st.global.b16" not in text


def test_without_the_alignment_hint_reads_fall_apart(ptx: dict[str, str]) -> None:
    """Negative control: the same row read through an address without the hint."""
    assert "ld.global.v4.b32" not in ptx["unhinted-alone-90"]


def test_the_barrier_releases_and_acquires_at_system_scope(ptx: dict[str, str]) -> None:
    for kernel in ("srs", "sag"):
        assert "atom.global.sys.release.exch.b32" in ptx[f"{kernel}-synced-90"]
        assert "atom.global.sys.acquire.add.u32" in ptx[f"{kernel}-synced-90"]
        assert "sys.release" not in ptx[f"{kernel}-alone-90"]


def on_first(function: Any, *arguments: Any) -> Any:
    return rank_processes().run(kernel_cases.on_rank_zero, function, arguments)[0]


@pytest.mark.parametrize("counts", kernel_cases.COUNTS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_virtual_ranks_agree_with_the_twin_and_leave_other_rows_alone(counts: list[int], dtype: str) -> None:
    on_first(kernel_cases.check_virtual, counts, dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_gathering_what_was_scattered_is_the_sum_over_ranks(ranks: int, tokens: int) -> None:
    on_first(kernel_cases.check_sum, ranks, tokens)


def test_the_residual_is_added_to_the_rows_of_its_tokens() -> None:
    on_first(kernel_cases.check_residual)


def test_the_norm_fused_into_srs_is_the_norm_of_its_rows() -> None:
    on_first(kernel_cases.check_norm)


def test_expert_ids_travel_beside_the_rows_of_sag_in_one_launch() -> None:
    on_first(kernel_cases.check_carried_ids)


def test_virtual_ranks_may_not_wait_inside_a_kernel() -> None:
    on_first(kernel_cases.check_virtual_barrier_refused)


@pytest.mark.parametrize("exit_barrier", [False, True])
def test_two_processes_with_the_fused_barrier_are_exact_under_random_delays(exit_barrier: bool) -> None:
    wrong = rank_processes().run(kernel_cases.rounds, 2, 12, True, exit_barrier)
    assert wrong[:2] == [0, 0]


def test_without_the_barrier_stale_rows_are_seen() -> None:
    """Negative control: the same rounds with the late rank not waited for."""
    wrong = rank_processes().run(kernel_cases.rounds, 2, 6, False, False)
    assert sum(wrong[:2]) > 0


def test_a_rank_that_does_not_come_is_reported_within_the_spin_limit() -> None:
    assert "did not arrive" in rank_processes().run(kernel_cases.lonely)[0]


@pytest.mark.parametrize("flow", ["tp_scattered", "tp_shuffled"])
def test_layers_over_the_kernels_are_lossless_and_count_the_same_rows(flow: str) -> None:
    from layer_cases import Case, check_case, run_cases

    cases = [Case(flow, "a2a_dedup", "random", tokens, "ends", residual=True, carry=True) for tokens in (0, 1, 7, 64)]
    results = rank_processes().run(run_cases, "shared_triton", 2, cases)
    for i, case in enumerate(cases):
        check_case(case, 2, [results[rank][i] for rank in range(2)], 1e-5)
