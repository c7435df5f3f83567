"""Bodies of the tests of captured layers: they run where TRITON_INTERPRET=1 was set before the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_reads import HostReadError, no_host_reads
from layer_cases import DTYPES, TOP_K, Case, CaseWeights, make_data
from rank_processes import transport_of

from harness.counting import Counter
from harness.device import graph
from harness.device.fixed import FixedBuffers, Shape, bucket, sizes_of, total_bytes
from harness.device.layer import DeviceLayer
from harness.layer import build_layers
from harness.measure import measure_batches
from harness.record import RankRecord
from harness.reference.gate import Gating
from harness.transport.virtual import run_virtual
from harness.virtual_pool import VirtualPool
from semmoe.errors import UserError
from semmoe.run import Run


def captured(
    transport: Any, case: Case, case_again: Case | None = None, cut: bool = False
) -> tuple[torch.Tensor, Counter, Any]:
    """(output, counts, carried slots) of layer 0 of this rank by a replay that may not read the device.

    Captured with the inputs of `case`, replayed with those of `case_again` (same shape), in poisoned buffers. cut: without its
    last phase.
    """
    data, ranks = make_data(case, transport.ranks), transport.ranks
    (layer,) = build_layers(
        transport, case.spec, data.placement, CaseWeights(case.hidden), Gating(top_k=TOP_K), layers=[0]
    )
    places = case.tokens if case.flow == "tp_replicated" else most_at_home(case, ranks, case_again)
    shape = Shape(0 if case.flow == "dp" else case.tokens, bucket(places))
    sizes = sizes_of(case.spec, ranks, shape)
    memory = transport.fixed_memory(total_bytes(sizes))
    fixed = FixedBuffers.in_memory(memory, transport.rank, sizes)
    made = DeviceLayer(layer, shape, fixed, graph._barrier(transport))
    fill(made, transport, case)
    transport.barrier()
    replay = graph.Replay(transport, made.phases, None)
    fill(made, transport, case_again or case)
    made.poison()
    transport.counter.reset()
    transport.barrier()
    again = made.phases[0] if cut else replay._again
    replay._again = lambda: watched(again)
    assert replay() >= 0
    made.count()
    output = made.output()
    return output.y, Counter(transport.rank, ranks, list(transport.counter.layers)), output.carried_slots_Tk


def watched(again: Any) -> None:
    with no_host_reads():
        again()


def most_at_home(case: Case, ranks: int, other: Case | None) -> int:
    homes = [make_data(c, ranks).homes_TL for c in (case, other or case)]
    return max(int(np.bincount(h[:, 0], minlength=ranks).max()) for h in homes if h is not None)


def fill(made: DeviceLayer, transport: Any, case: Case) -> None:
    data, rank = make_data(case, transport.ranks), transport.rank
    slots_Tk = torch.from_numpy(data.slots_TLk[:, 0])
    homes_T = None if data.homes_TL is None else data.homes_TL[:, 0]
    if case.flow == "dp":
        assert homes_T is not None
        mine = torch.from_numpy(homes_T == rank)
        made.fill(data.x_TH[mine].to(DTYPES[case.dtype]), slots_Tk[mine], homes_T)
    else:
        made.fill(data.parts_GTH[rank], slots_Tk, homes_T)


def virtual_captured(ranks: int, cases: list[tuple[Case, Case | None]], cut: bool = False) -> list[list[Any]]:
    """By case and virtual rank."""
    return [run_virtual(ranks, lambda t, pair=pair: captured(t, *pair, cut), "triton", 300.0) for pair in cases]


def process_captured(ranks: int, cases: list[tuple[Case, Case | None]]) -> list[Any]:
    """On a rank process, whose kernels wait for their peers."""
    transport = transport_of("shared_fused", ranks)
    return [] if transport is None else [captured(transport, *pair) for pair in cases]


def reads_are_seen() -> list[str]:
    """Each thing that a graph cannot hold, as the guard names it."""
    x = torch.arange(6)
    acts = [
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x.cpu(), lambda: x[x > 2], lambda: x.nonzero(),
        lambda: bool((x > 7).any()), lambda: int(x[0]), lambda: torch.bincount(x), lambda: x.repeat_interleave(x),
        lambda: torch.tensor([1]), lambda: x.to("cpu"), lambda: x.__setitem__(x > 2, 0),
    ]  # fmt: skip
    seen = []
    for act in acts:
        try:
            with no_host_reads():
                act()
        except HostReadError as error:
            seen.append(str(error))
    assert len(seen) == len(acts)
    with no_host_reads():
        torch.where(x > 2, x, -1).index_select(0, x).repeat_interleave(2, output_size=12)
    return seen


def measured_by_replays(run: Run, spoiled: bool) -> tuple[list[RankRecord] | str, int]:
    """(what the ranks of a measured run bring back, or what they say, captures): `measure_batches` as on a GPU, dry.

    spoiled: answers are not summed, so that the check must see it.
    """
    captures = []
    record = graph.Replay.__init__

    def counted(self: Any, transport: Any, *rest: Any) -> None:
        captures.append(transport.rank)
        record(self, transport, *rest)
        again = self._again
        self._again = lambda: watched(again)

    with pytest.MonkeyPatch.context() as patch, VirtualPool(run.ep_size, timeout_s=300.0) as pool:
        patch.setattr(graph, "why_eager", lambda run, device: None)
        patch.setattr(graph.Replay, "__init__", counted)
        if spoiled:
            patch.setattr(DeviceLayer, "_combine", lambda self: setattr(self, "back_BG", self.rows_pulled_BG))
        try:
            return pool.run(measure_batches, run), len(captures)
        except UserError as error:
            return str(error), len(captures)
