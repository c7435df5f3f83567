"""Transports: operations in any order and number, on real processes, and what they refuse."""

from __future__ import annotations

import glob
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import rank_processes, transport_of

from harness.transport.base import Transport
from harness.transport.codec import bytes_of, decode, encode, torch_dtype
from harness.transport.plan import ShufflePlan
from harness.transport.rows import EMPTY_SLOT, RowTransport
from harness.transport.staged import stage_bytes_for
from harness.transport.virtual import run_virtual
from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError

HIDDEN = 8


def rows_from(sender: int, receiver: int, index: int, number: int) -> torch.Tensor:
    """Rows that tell who sent them to whom in which round."""
    return torch.full((number, HIDDEN), float(100 * index + 10 * sender + receiver))


def number_of(sender: int, receiver: int, index: int) -> int:
    return 0 if sender == receiver else (3 * sender + receiver + index) % 4


def exchanges(transport: Transport, rounds: int, slots: bool) -> int:
    """Dispatches and combines in a row with random delays; how many rounds brought anything else than was sent."""
    rank, ranks, wrong = transport.rank, transport.ranks, 0
    late = random.Random(rank)
    for index in range(rounds):
        send_G = [number_of(rank, d, index) for d in range(ranks)]
        rows = torch.cat([rows_from(rank, d, index, n) for d, n in enumerate(send_G)])
        meta = torch.arange(2 * len(rows), dtype=torch.int32).view(-1, 2) + rank
        time.sleep(late.uniform(0, 0.004))
        if slots:
            got = transport.dispatch_slots(rows, send_G, meta, 4, 0)
        else:
            got = transport.dispatch(rows, send_G, meta, send_G, 0)
        came = [number_of(s, rank, index) for s in range(ranks)]
        expected = torch.cat([rows_from(s, rank, index, n) for s, n in enumerate(came)])
        wrong += not (got.rows_G == got.meta_G == came and torch.equal(got.rows_NC, expected))
        wrong += bool((got.meta_M2[:, 0] == EMPTY_SLOT).any())
        if slots:
            back = transport.combine_slots(got.rows_NC * 2, got, send_G, 4, 0)
        else:
            back = transport.combine(got.rows_NC * 2, got.rows_G, send_G, 0)
        wrong += not torch.equal(back, rows * 2)
    return wrong


def exchanges_on_process(name: str, rounds: int, slots: bool) -> int:
    return exchanges(transport_of(name, 4), rounds, slots)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", ["collective", "shared"])
def test_exchanges_in_a_row_bring_what_was_sent_under_random_delays(name: str, slots: bool) -> None:
    assert rank_processes().run(exchanges_on_process, name, 25, slots) == [0] * 4


@pytest.mark.parametrize("slots", [False, True])
def test_virtual_ranks_exchange_like_processes(slots: bool) -> None:
    assert run_virtual(3, lambda t: exchanges(t, 20, slots)) == [0] * 3


def repeated(name: str, rounds: int) -> int:
    """The same operation again and again, with no other in between: the case that one buffer would not survive."""
    transport = transport_of(name, 4)
    late, wrong = random.Random(transport.rank), 0
    plan = ShufflePlan.from_homes(torch.tensor([2, 0, 3, 0, 2, 2, 1]).numpy(), 4)
    for index in range(rounds):
        x_GTH = torch.randn(4, 7, HIDDEN, generator=torch.Generator().manual_seed(index)).round(decimals=1)
        time.sleep(late.uniform(0, 0.004))
        rows = transport.srs(x_GTH[transport.rank], plan)
        wrong += not torch.allclose(rows, x_GTH.sum(0)[plan.mine_T(transport.rank)], atol=1e-5)
    for index in range(rounds):
        values = torch.arange(7.0)[:, None].repeat(1, HIDDEN) + index
        time.sleep(late.uniform(0, 0.004))
        wrong += not torch.equal(transport.sag(values[plan.mine_T(transport.rank)], plan), values)
    for index in range(rounds):
        x_GTH = torch.randn(4, 7, HIDDEN, generator=torch.Generator().manual_seed(index))
        wrong += not torch.allclose(transport.all_reduce(x_GTH[transport.rank]), x_GTH.sum(0), atol=1e-5)
        wrong += not torch.equal(x_GTH, torch.randn(4, 7, HIDDEN, generator=torch.Generator().manual_seed(index)))
    return wrong


@pytest.mark.parametrize("name", ["collective", "shared"])
def test_the_same_operation_many_times_in_a_row(name: str) -> None:
    assert rank_processes().run(repeated, name, 15) == [0] * 4


def faulty(fault: str, rounds: int) -> int:
    """SRS rounds with one guard of the shared transport taken away; wrong rounds on this rank."""
    from harness.transport.shared import SharedTransport

    transport = SharedTransport(stage_bytes=1 << 12, arena_bytes=1 << 12)
    memory, rank = transport.memory, transport.rank
    assert memory is not None
    whole = memory.barrier
    plan = ShufflePlan.from_homes(torch.tensor([2, 0, 3, 0, 2, 2, 1]).numpy(), 4)
    wrong = 0
    for index in range(rounds):
        x_GTH = torch.full((4, 7, HIDDEN), float(index + 1))
        if index == 2 and fault == "no barrier":  # both staging areas hold rows by now
            time.sleep(0.05 * (rank == 0))
            memory.barrier = lambda: None  # type: ignore[method-assign]
        if fault != "no barrier":
            memory.barrier = lambda: (whole(), time.sleep(0.02 * (rank == 0)))[0]  # type: ignore[func-returns-value,method-assign]
        if fault == "one area":
            transport._parity = 0
        wrong += not torch.equal(transport.srs(x_GTH[rank], plan), x_GTH.sum(0)[plan.mine_T(rank)])
    torch.distributed.barrier()
    return wrong


@pytest.mark.parametrize("fault", ["no barrier", "one area"])
def test_shared_memory_without_a_barrier_or_a_second_area_is_seen_to_fail(fault: str) -> None:
    """Negative control of the tests above: each guard is needed, and its absence shows."""
    assert sum(rank_processes().run(faulty, "none", 6)) == 0
    assert sum(rank_processes().run(faulty, fault, 6)) > 0


class OneOfTwo(RowTransport):
    """Rank 0 of two ranks, the other of which sends `came` whatever it gets."""

    def __init__(self, came: torch.Tensor) -> None:
        super().__init__(0, 2)
        self.came, self.exchanges = came, 0

    def _all_to_all(self, flat: torch.Tensor, send_bytes_G: Any, receive_bytes_G: Any) -> torch.Tensor:
        self.exchanges += 1
        assert list(receive_bytes_G) == [0, len(self.came)] and sum(send_bytes_G) == len(flat)
        return self.came


def test_expert_ids_travel_in_the_exchange_of_their_rows() -> None:
    rows_TC, ids_Tk = torch.arange(12.0).view(3, 4), torch.arange(6, dtype=torch.int16).view(3, 2)
    plan = ShufflePlan.from_homes(np.array([1, 0, 1]), 2)
    came = torch.cat([bytes_of(x[plan.mine_T(1)]).view(-1) for x in (rows_TC, ids_Tk)])
    transport = OneOfTwo(came)
    transport.counter.start_layer()
    got = transport.sag_with_ids(rows_TC[plan.mine_T(0)], ids_Tk[plan.mine_T(0)], plan)
    assert transport.exchanges == 1
    assert torch.equal(got[0], rows_TC) and torch.equal(got[1], ids_Tk)
    assert [(o.op, o.received_G) for o in transport.counter.now.operations] == [("sag", [1, 2]), ("expert_ids", [1, 2])]


def test_sums_are_equal_to_the_bit_on_every_rank() -> None:
    def body(transport: Any) -> torch.Tensor:
        x_GTH = torch.randn(4, 9, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
        return transport.all_reduce(x_GTH[transport.rank])

    first, *others = run_virtual(4, body)
    assert all(torch.equal(first, other) for other in others)


def padding(name: str) -> tuple[int, int]:
    transport = transport_of(name, 4)
    transport.counter.reset()
    transport.counter.start_layer()
    meta = torch.zeros(1, 2, dtype=torch.int32)
    send_G = [int(d == (transport.rank + 1) % 4) for d in range(4)]
    transport.dispatch_slots(torch.zeros(1, HIDDEN), send_G, meta, 5, 0)
    return transport.counter.now.padding_bytes, transport.counter.now.metadata_sent_bytes


def test_unused_places_count_as_padding_where_they_travel() -> None:
    row = HIDDEN * 4 + 8
    assert rank_processes().run(padding, "collective") == [(14 * row, 8)] * 4
    assert rank_processes().run(padding, "shared") == [(0, 8)] * 4


def timeout_message(name: str) -> str:
    """Rank 2 stays away from a barrier; the others report it. Then all meet again on a fresh transport."""
    from harness.transport.shared import SharedTransport

    transport = SharedTransport(stage_bytes=1 << 12, arena_bytes=1 << 12, timeout_s=0.5)
    if transport.rank == 2:
        torch.distributed.barrier()
        return ""
    try:
        transport.barrier()
    except RuntimeError as error:
        torch.distributed.barrier()
        return str(error)
    return "no error"


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    messages = rank_processes().run(timeout_message, "shared")
    assert messages[2] == ""
    assert all(f"rank {r} waited 0.5 s for rank 2" in messages[r] for r in (0, 1, 3))


def refusals() -> list[str]:
    from harness.transport.shared import SharedTransport

    transport = SharedTransport(stage_bytes=1 << 10, arena_bytes=1 << 10)
    found = []
    for attempt in (
        lambda: transport.all_reduce(torch.zeros(1000, HIDDEN)),
        lambda: transport.alloc(1000, HIDDEN, torch.float32),
        lambda: SharedTransport(kernel_path="tritn"),
    ):
        try:
            attempt()
        except UserError as error:
            found.append(str(error))
    transport.close()
    try:
        transport.barrier()
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_too_small_memory_and_wrong_names_are_refused_with_what_to_change() -> None:
    stage, arena, path, closed = rank_processes().run(refusals)[0]
    assert "raise stage_bytes" in stage and "raise arena_bytes" in arena
    assert "did you mean 'triton'" in path and "closed" in closed


def test_no_file_of_shared_memory_stays_behind() -> None:
    rank_processes().run(exchanges_on_process, "shared", 1, False)
    assert [name for name in glob.glob("/dev/shm/semmoe-*") if Path(name).is_file()] == []  # folders: other pools'


def test_stage_bytes_hold_the_largest_operation_of_a_step() -> None:
    spec = DispatchSpec(flow="dp", dispatcher="a2a_assignment", hidden=64, top_k=6, activation_dtype="fp32")
    assert stage_bytes_for(spec, 100, 4, 0) >= 100 * 6 * (64 * 4 + 8)
    slots = DispatchSpec(flow="dp", dispatcher="low_latency", hidden=64, top_k=6, activation_dtype="fp32")
    assert stage_bytes_for(slots, 10, 4, 50) >= 4 * 50 * 6 * (64 * 4 + 8)


@pytest.mark.parametrize("hidden", [16, 128, 130, 300])
def test_fp8_rows_have_one_scale_per_block_and_come_back_within_a_sixteenth(hidden: int) -> None:
    rows = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    rows[0, :7] = 0
    sent = encode(rows, "fp8")
    spec = DispatchSpec(flow="dp", dispatcher="low_latency", hidden=hidden, top_k=1)
    assert sent.shape == (5, spec.dispatch_row_bytes) and sent.dtype == torch.uint8
    back = decode(sent, hidden, "fp8", torch.float32)
    block_max = torch.stack([b.abs().amax(1) for b in rows.split(128, dim=1)], 1).repeat_interleave(128, 1)[:, :hidden]
    # half a step of 3 mantissa bits, or half of the smallest step of a block
    assert ((back - rows).abs() <= rows.abs() / 16 + block_max * 2**-10 / 448 * 1.01).all()
    assert torch.equal(
        decode(encode(torch.zeros(2, hidden), "fp8"), hidden, "fp8", torch.float32), torch.zeros(2, hidden)
    )


def test_rows_as_bytes_keep_every_dtype_and_no_rows() -> None:
    for name in ("fp32", "bf16", "fp16"):
        rows = torch.randn(3, 6).to(torch_dtype(name))
        assert torch.equal(bytes_of(rows).view(rows.dtype), rows)
        assert bytes_of(rows[:0]).shape == (0, 6 * rows.element_size())
    with pytest.raises(UserError, match="computes in fp32, bf16, fp16"):
        torch_dtype("mxfp4")


def test_a_failing_virtual_rank_gives_its_own_error() -> None:
    def body(transport: Any) -> None:
        if transport.rank == 1:
            raise KeyError("rank 1's fault")
        transport.barrier()

    with pytest.raises(KeyError, match="rank 1's fault"):
        run_virtual(3, body)
