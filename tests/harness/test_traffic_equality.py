"""What the harness counts while it runs a planner's step is, to the last row, what the core counts from the routes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_trace
from rank_processes import rank_processes, transport_of
from traffic_cases import HIDDEN, RANKS, SLOTS, Scores

from harness import dispatchers
from harness.counting import Counter, CountError, gather_traffic, traffic_of
from harness.layer import Routes, build_layers
from harness.reference import shuffle
from harness.reference.gate import Gating
from harness.transport.virtual import VirtualTransport, run_virtual
from semmoe.dispatch import DispatchSpec, valid_pairs
from semmoe.placement.base import Placement
from semmoe.planning import RoutedStep, StepPlanner
from semmoe.replica_router import LeastLoaded
from semmoe.schedule.semantic import Semantic
from semmoe.traffic import Traffic, count_traffic, differences

PAIRS = valid_pairs()


class Weights:
    hidden, num_experts = HIDDEN, 8

    def gate_EH(self, layer: int) -> torch.Tensor:
        return torch.ones(self.num_experts, HIDDEN)

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((32, HIDDEN), 0.01 * expert), torch.full((HIDDEN, 16), 0.1)


def spec_of(flow: str, dispatcher: str | None, top_k: int) -> DispatchSpec:
    """The default dtypes: bf16, and fp8 rows for low_latency."""
    return DispatchSpec(
        flow=flow, dispatcher=dispatcher, hidden=HIDDEN, top_k=top_k, carry_expert_ids=flow == "tp_shuffled"
    )


def plan(flow: str, dispatcher: str | None, tokens: int = 61) -> tuple[DispatchSpec, Placement, RoutedStep]:
    """A step of the planner over a trace, with replicas and, in tp_shuffled, a semantic token scheduler."""
    trace = make_trace()
    rng = np.random.default_rng(5)
    rows = [rng.permutation(np.concatenate([np.arange(8), rng.permutation(8)[:4]])) for _ in range(trace.num_layers)]
    placement = Placement(np.stack(rows).astype(np.int32), RANKS, tuple(trace.layer_ids_L), 8)
    spec = spec_of(flow, dispatcher, trace.top_k)
    planner = StepPlanner(trace, placement, spec, Semantic(), Scores(), LeastLoaded(), home_cap=1.2)
    rows_T = np.sort(rng.choice(trace.num_tokens, tokens, replace=False))
    return spec, placement, planner.route(rows_T, trace.request_T[rows_T] % 3)  # rank 3 stays idle in dp


def execute(transport: Any, flow: str, dispatcher: str | None) -> Traffic:
    """This rank's part of the step, and the Traffic that all ranks counted."""
    spec, placement, step = plan(flow, dispatcher)
    layers = build_layers(transport, spec, placement, Weights(), Gating(top_k=spec.top_k), max_tokens=61)
    transport.counter.reset()
    for index, layer in enumerate(layers):
        homes_T = None if step.homes_TL is None else step.homes_TL[:, index]
        slots_Tk = torch.from_numpy(step.slots_TLk[:, index].astype(np.int64))
        x_TH = torch.ones(len(slots_Tk), HIDDEN, dtype=torch.bfloat16)
        if flow == "dp":
            mine = torch.from_numpy(homes_T == transport.rank)
            layer.forward(x_TH[mine], Routes(slots_Tk[mine]))
        else:
            layer.forward(x_TH, Routes(slots_Tk), homes_T)
    return gather_traffic(transport)


def expected(flow: str, dispatcher: str | None) -> Traffic:
    spec, placement, step = plan(flow, dispatcher)
    return count_traffic(step.slots_TLk, step.homes_TL, SLOTS, placement.ep_size, spec)


def on_process(name: str, pairs: list[tuple[str, str | None]]) -> list[Traffic]:
    return [execute(transport_of(name, RANKS), *pair) for pair in pairs]


@pytest.mark.parametrize("transport", ["collective", "shared"])
def test_counted_traffic_is_that_of_the_routes_on_real_processes(transport: str) -> None:
    results = rank_processes().run(on_process, transport, PAIRS)
    for i, pair in enumerate(PAIRS):
        wanted = expected(*pair)
        for rank in range(RANKS):
            assert differences(results[rank][i], wanted) == [], pair
            assert results[rank][i].tokens == wanted.tokens == 61
    assert any(t.metadata_bytes > 0 for t in results[0])


@pytest.mark.parametrize(("flow", "dispatcher"), PAIRS)
def test_counted_traffic_is_that_of_the_routes_on_virtual_ranks(flow: str, dispatcher: str | None) -> None:
    counted = run_virtual(RANKS, lambda t: execute(t, flow, dispatcher))
    assert all(differences(c, expected(flow, dispatcher)) == [] for c in counted)


@pytest.mark.parametrize(("flow", "dispatcher"), [p for p in PAIRS if p[1] not in (None, "allgather_rs")])
def test_one_row_dropped_on_one_rank_is_seen(flow: str, dispatcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the dispatch of rank 1 forgets one choice of its last token, in every layer."""
    whole = dispatchers.pack

    def forgetful(slots_nk: Any, weights_nk: Any, slots_per_rank: int, rank: int, ranks: int) -> Any:
        packing = whole(slots_nk, weights_nk, slots_per_rank, rank, ranks)
        if rank != 1:
            return packing
        last = max(d for d in range(ranks) if packing.send_assignments_G[d])
        assignments_G, pairs_G = list(packing.send_assignments_G), list(packing.send_pairs_G)
        assignments_G[last] -= 1
        pairs_G[last] -= int(packing.remote_first_A[-1])
        return type(packing)(
            packing.local_token_A,
            packing.local_slot_A,
            packing.local_weight_A,
            packing.local_pairs,
            packing.remote_token_A[:-1],
            packing.remote_first_A[:-1],
            packing.remote_meta_A2[:-1],
            assignments_G,
            pairs_G,
        )

    monkeypatch.setattr(dispatchers, "pack", forgetful)
    found = differences(run_virtual(RANKS, lambda t: execute(t, flow, dispatcher))[0], expected(flow, dispatcher))
    assert any(line.startswith("assignment_pairs_LGG[0, 1, ") for line in found)
    assert any(line.startswith("expert_rows_LG") for line in found)


@pytest.mark.parametrize("flow", ["tp_scattered", "tp_shuffled"])
def test_one_row_less_pulled_on_one_rank_is_an_error_that_names_it(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the pull loop of rank 2 skips the last row that it should fetch from rank 0."""
    whole = shuffle.sag

    this_thread = threading.local()

    def lossy(peers_G, plan):  # type: ignore[no-untyped-def]
        out_TC, pulled_G = whole(peers_G, plan)
        if this_thread.rank == 2:
            out_TC[plan.mine_T(0)[-1]] = 0
            pulled_G[0] -= 1
        return out_TC, pulled_G

    def body(transport: VirtualTransport) -> Traffic:
        this_thread.rank = transport.rank
        return execute(transport, flow, "a2a_dedup")

    monkeypatch.setattr(shuffle, "sag", lossy)
    with pytest.raises(
        CountError, match=r"layer 0, (sag|all_gather): rank 2 received \d+ rows from rank 0, which sent"
    ):
        run_virtual(RANKS, body)


def counters() -> list[Counter]:
    """Two ranks, one layer of dp: rank 0 sends 3 rows to rank 1, which sends 2 back and keeps 1."""
    rows = ([0, 3], [0, 2]), ([2, 1], [3, 1])
    made = []
    for rank, (sent, received) in enumerate(rows):
        counter = Counter(rank, 2)
        counter.start_layer()
        counter.exchange("dispatch", 32, sent, received)
        counter.exchange("combine", 32, received, sent)
        now = counter.now
        now.homes, now.expert_rows, now.active_experts = sum(sent), sum(received), 1
        now.assignments_sent_G, now.assignments_served_G = sent, received
        now.pairs_sent_G, now.pairs_served_G = sent, received
        made.append(counter)
    return made


def test_counters_of_all_ranks_make_one_traffic() -> None:
    traffic = traffic_of(counters()[::-1])
    assert traffic.homes_LG.tolist() == [[3, 3]]
    assert traffic.assignment_pairs_LGG.tolist() == [[[0, 3], [2, 1]]]
    assert [(c.op, c.remote_rows_LGG().sum(), c.row_bytes) for c in traffic.collectives] == [
        ("dispatch", 5, 32.0),
        ("combine", 5, 32.0),
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda c: c[1].now.operations[0].received_G.__setitem__(0, 2), "dispatch: rank 1 received 2 rows from rank 0"),
        (lambda c: setattr(c[0].now, "expert_rows", 1), "experts of rank 0 multiplied 1 rows, 2 arrived"),
        (lambda c: setattr(c[1].now, "metadata_received_bytes", 8), "8 bytes of metadata received, 0 sent"),
        (lambda c: setattr(c[1].now.operations[1], "row_bytes", 16), "16 bytes a row on rank 1"),
        (lambda c: c[1].now.operations.pop(), "rank 1 ran \\['dispatch'\\]"),
        (lambda c: c[1].start_layer(), "rank 1 counted 2 layers"),
        (
            lambda c: setattr(c[1].now, "pairs_sent_G", [1, 1]),
            "pairs: rank 0 received 2 rows from rank 1, which sent 1",
        ),
    ],
)
def test_counts_that_disagree_are_refused_with_rank_and_layer(fault: Any, message: str) -> None:
    made = counters()
    fault(made)
    with pytest.raises(CountError, match=message):
        traffic_of(made)
