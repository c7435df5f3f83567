"""Bodies of the kernel tests: they run where TRITON_INTERPRET=1 was set before the kernels were imported."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import transport_of
from shuffle_cases import sum_case

from harness.reference import shuffle
from harness.transport.base import address_table
from harness.transport.plan import ShufflePlan

COUNTS = [[1, 20, 3, 0, 5, 1, 0, 9], [0, 0, 39, 0, 0, 0, 0, 0], [5] * 8]
HIDDEN = 48  # not a power of two: the last columns of a block are masked
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def on_rank_zero(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments) if dist.get_rank() == 0 else None


def plan_of(counts: list[int], seed: int = 1) -> ShufflePlan:
    """Homes in random order: the permutation is not its own inverse, so a mixed-up direction shows."""
    rng = np.random.default_rng(seed)
    plan = ShufflePlan.from_homes(rng.permutation(np.repeat(np.arange(len(counts)), counts)), len(counts))
    if plan.tokens > 7 and max(counts) < plan.tokens:
        assert not torch.equal(plan.perm_T[plan.perm_T], torch.arange(plan.tokens))
    return plan


def check_virtual(counts: list[int], dtype: str) -> None:
    """Both kernels, all ranks: fp32 equal to the twin to the bit, bf16 within one step (the interpreter truncates)."""
    from harness.kernels.launch import launch_sag, launch_srs

    plan, ranks = plan_of(counts), len(counts)
    tolerance = {"fp32": 0.0, "bf16": 2**-7}[dtype]
    x_GTH = torch.randn(ranks, plan.tokens, HIDDEN, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    rows_G = []
    for rank in range(ranks):
        out_TH = torch.full((plan.tokens, HIDDEN), torch.nan, dtype=x_GTH.dtype)
        rows, pulled_BG = launch_srs(address_table(list(x_GTH)), x_GTH[0], plan, rank, out_NH=out_TH, blocks=3)
        expected, pulled_by_twin_G = shuffle.srs(list(x_GTH), plan, rank)
        torch.testing.assert_close(rows, expected, rtol=tolerance, atol=0)
        assert pulled_BG.sum(0).tolist() == pulled_by_twin_G == [counts[rank]] * ranks
        assert out_TH[counts[rank] :].isnan().all()
        rows_G.append(rows.contiguous())
    out, pulled_BG = launch_sag(address_table(rows_G), rows_G[0], plan, blocks=3)
    assert torch.equal(out, shuffle.sag(rows_G, plan)[0])
    assert pulled_BG.sum(0).tolist() == counts


def check_sums(cases: list[tuple[int, int, str]]) -> None:
    """SAG(SRS(X)) of virtual ranks by kernels is the rank-order fp32 sum to the bit, in every case of `shuffle_cases`."""
    from harness.kernels.launch import launch_sag, launch_srs

    for ranks, tokens, kind in cases:
        plan, x_GTH, expected_TH = sum_case(ranks, tokens, kind)
        table, blocks = address_table(list(x_GTH)), 3 if tokens > 64 else 16
        rows_G = [launch_srs(table, x_GTH[0], plan, rank, blocks=blocks)[0].contiguous() for rank in range(ranks)]
        got_TH, _ = launch_sag(address_table(rows_G), rows_G[0], plan, blocks=blocks)
        assert torch.equal(got_TH, expected_TH), (ranks, tokens, kind)


def check_residual() -> None:
    from harness.kernels.launch import launch_srs

    plan = plan_of([3, 0, 6])
    x_GTH, residual_TH = torch.ones(3, 9, HIDDEN), torch.arange(9.0)[:, None].repeat(1, HIDDEN)
    for rank in (0, 2):
        rows, _ = launch_srs(address_table(list(x_GTH)), x_GTH[0], plan, rank, residual_TH)
        assert torch.equal(rows[:, 0], 3 + plan.mine_T(rank).float())


def check_norm() -> None:
    """SRS with residual and RMSNorm is SRS, then RMSNorm; rows of other ranks stay NaN; the plan may stay on the device."""
    from harness.kernels.launch import RMSNorm, launch_srs
    from harness.reference.ranking import rank_tokens

    plan = plan_of([3, 0, 6])
    made = torch.Generator().manual_seed(3)
    x_GTH, residual_TH = torch.randn(3, 9, HIDDEN, generator=made), torch.randn(9, HIDDEN, generator=made)
    weight_H = torch.rand(HIDDEN, generator=made)
    for rank in range(3):
        expected, _ = shuffle.srs(list(x_GTH), plan, rank, residual_TH)
        for ours in (plan, rank_tokens(plan.owner_T, 3)):
            normed = RMSNorm(weight_H, torch.full((9, HIDDEN), torch.nan), 1e-5)
            table, count = address_table(list(x_GTH)), len(expected)
            rows, _ = launch_srs(table, x_GTH[0], ours, rank, residual_TH, blocks=2, norm=normed)
            assert torch.equal(rows[:count], expected)
            torch.testing.assert_close(normed.out_NH[:count], shuffle.rms_norm(expected, weight_H, 1e-5))
            torch.testing.assert_close(
                normed.out_NH[:count], torch.nn.functional.rms_norm(expected, (HIDDEN,), weight_H, 1e-5)
            )
            assert normed.out_NH[count:].isnan().all()


def check_carried_ids() -> None:
    """Rows and ids of one launch are those of two; ids of rows beyond a rank's count never travel."""
    from harness.kernels.launch import CarriedIds, launch_sag

    plan = plan_of([3, 0, 6])
    made = torch.Generator().manual_seed(4)
    rows_G, ids_G = torch.randn(3, 9, HIDDEN, generator=made), torch.randint(0, 99, (3, 9, 6), generator=made).short()
    ids = CarriedIds(address_table(list(ids_G)), torch.full((9, 6), -1, dtype=torch.int16))
    out, pulled_BG = launch_sag(address_table(list(rows_G)), rows_G[0], plan, blocks=2, ids=ids)
    assert torch.equal(out, shuffle.sag(list(rows_G), plan)[0])
    assert torch.equal(ids.out_Tk, shuffle.sag(list(ids_G), plan)[0])
    assert pulled_BG.sum(0).tolist() == [3, 0, 6]


def check_virtual_barrier_refused() -> None:
    from harness.kernels.launch import make_barrier
    from harness.transport.virtual import run_virtual
    from semmoe.errors import UserError

    try:
        run_virtual(2, make_barrier)
    except UserError as error:
        assert "virtual ranks cannot wait" in str(error)
    else:
        raise AssertionError("a barrier among virtual ranks was allowed")


def rounds(ranks: int, number: int, barrier: bool, exit_barrier: bool, first: int = 0) -> int:
    """SRS then SAG over shared memory, `number` rounds with other values, homes and delays each; rounds that were wrong. first:
    the number of the first, so that calls one after another go on with new ones.

    Buffers X and Z are apart, so that one entry barrier a kernel must be enough. Without a barrier every second round
    rank 0 comes late on purpose.
    """
    from harness.kernels.launch import launch_sag, launch_srs, make_barrier

    transport = transport_of("shared", ranks)
    if transport is None:
        return 0
    tokens, rank, wrong = 9, transport.rank, 0
    x, z = (transport.alloc(tokens, HIDDEN, torch.float32) for _ in range(2))
    state = make_barrier(transport, blocks=2, spin_limit=200_000) if barrier else None
    late = random.Random(1000 * first + rank)
    for index in range(first, first + number):
        rng = np.random.default_rng(index)
        homes_T = np.ones(tokens, int) if index % 3 == 2 else rng.integers(0, ranks, tokens)
        plan = ShufflePlan.from_homes(homes_T, ranks)
        values_GTH = torch.from_numpy(rng.integers(-99, 99, (ranks, tokens, HIDDEN))).float()
        time.sleep(late.uniform(0, 0.02) if barrier else 0.1 * (rank == 0))
        x.local.copy_(values_GTH[rank])
        kept = {"barrier": state, "exit_barrier": exit_barrier, "blocks": 2}
        rows, _ = launch_srs(x.table_G, x.local, plan, rank, **kept)
        if exit_barrier:
            x.local.fill_(torch.nan)  # allowed at once after an exit barrier
        z.local[: len(rows)] = rows
        time.sleep(late.uniform(0, 0.02) if barrier else 0.0)
        out, _ = launch_sag(z.table_G, z.local, plan, rank, **kept)
        wrong += not torch.equal(out, values_GTH.sum(0))
        if state is not None:
            state.check()
    transport.barrier()
    return wrong


def barrier_alone(number: int) -> int:
    """What symmetric memory waits with: the barrier as a kernel of its own, between writing a buffer and reading it."""
    from harness.kernels.launch import launch_barrier, make_barrier

    transport = transport_of("shared", 2)
    if transport is None:
        return 0
    pair = [transport.alloc(1, 4, torch.float32) for _ in range(2)]
    state, late, wrong = make_barrier(transport, blocks=2, spin_limit=200_000), random.Random(transport.rank), 0
    for index in range(number):
        time.sleep(late.uniform(0, 0.02))
        pair[index % 2].local.fill_(index)
        launch_barrier(state, transport.rank)
        wrong += sum(bool((peer != index).any()) for peer in pair[index % 2].peers_G)
    state.check()
    transport.barrier()
    return wrong


def lonely() -> str:
    """Rank 0 of 2 enters a kernel that rank 1 never starts: the spin limit ends it, with a message."""
    from harness.kernels.launch import launch_srs, make_barrier

    transport = transport_of("shared", 2)
    if transport is None:
        return ""
    x = transport.alloc(4, HIDDEN, torch.float32)
    state = make_barrier(transport, blocks=1, spin_limit=50)
    message = ""
    if transport.rank == 0:
        launch_srs(x.table_G, x.local, plan_of([2, 2]), 0, barrier=state)
        try:
            state.check()
        except RuntimeError as error:
            message = str(error)
    transport.barrier()
    return message
