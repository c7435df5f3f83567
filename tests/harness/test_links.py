"""Bus bandwidth from counted bytes and phase times; the device clock's order of work, on a stand-in for CUDA."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.critical_path import attribute  # noqa: E402
from harness.device.clock import DeviceTimer, device_ns, devices_meet, timer_of  # noqa: E402
from harness.links import PortMeter, link_of, port_bytes  # noqa: E402
from harness.timing import PhaseTimer  # noqa: E402
from semmoe.results import COLUMNS  # noqa: E402
from semmoe.traffic import Traffic  # noqa: E402
from semmoe.traffic.collective import Collective  # noqa: E402
from tests.harness.fake_cuda import Cuda  # noqa: E402


def traffic(*collectives: Collective, ranks: int = 4) -> Traffic:
    zero_LG, zero_LGG = np.zeros((1, ranks), dtype=np.int64), np.zeros((1, ranks, ranks), dtype=np.int64)
    return Traffic(zero_LG, zero_LGG, zero_LGG, zero_LG, zero_LG, collectives, tokens=8)


def to_rank_0(op: str) -> Collective:
    """Rank 0 sends 30 rows and keeps 5, the others send it 30 each."""
    rows_LGG = np.zeros((1, 4, 4), dtype=np.int64)
    rows_LGG[0, 0] = [5, 10, 10, 10]
    rows_LGG[0, 1:, 0] = 30
    return Collective(op, 1000.0, rows_LGG)


def test_the_busiest_port_of_each_layer_counts_and_rows_that_stay_count_apart():
    ports = PortMeter()
    for _ in range(3):
        ports.add(traffic(to_rank_0("dispatch")))
    columns = ports.columns({"dispatch_ms": 1.0}, link_gbps=0.18, link="a copy")
    assert columns["dispatch_busbw_gbps"] == pytest.approx(0.09) and columns["dispatch_link_share"] == pytest.approx(
        0.5
    )
    assert columns["local_bytes"] == 3 * 5 * 1000
    assert set(columns) <= set(COLUMNS) and "combine_busbw_gbps" not in columns


def test_balanced_exchanges_have_the_bus_bandwidth_of_nccl_tests():
    """S bytes in all on each rank: S * (n - 1) / n cross a port in t of an all-to-all, twice that of an all-reduce."""
    size_bytes, ranks = 4 * 25 * 1000.0, 4
    even = Collective("dispatch", 1000.0, np.full((1, ranks, ranks), 25))
    assert port_bytes(even, ranks) == size_bytes * (ranks - 1) / ranks
    reduced = Collective("all_reduce", 1000.0, buffer_rows_L=np.array([100]))
    assert port_bytes(reduced, ranks) == 2 * size_bytes * (ranks - 1) / ranks


def test_operations_count_in_the_phase_that_they_are_timed_in():
    ports = PortMeter()
    ports.add(traffic(*(to_rank_0(op) for op in ("reduce_scatter", "expert_ids", "dispatch", "combine", "all_gather"))))
    assert dict(ports.port_bytes) == {"srs": 9e4, "dispatch": 9e4, "combine": 9e4, "sag": 18e4}
    ports = PortMeter()
    reduced = Collective("all_reduce", 1000.0, buffer_rows_L=np.array([100]))
    ports.add(traffic(reduced, reduced))
    assert dict(ports.port_bytes) == {"srs": 15e4, "sag": 15e4}


def test_without_a_link_or_without_phases_there_is_no_share():
    ports = PortMeter()
    ports.add(traffic(to_rank_0("dispatch")))
    for where in ("CPU processes", "virtual ranks on one GPU"):
        gbps, link = link_of(None, where)  # type: ignore[arg-type]  # no pool is asked
        assert gbps is None and where in link and "no link speed follows" in link
    assert ports.columns({"dispatch_ms": 1.0}, None, "none")["dispatch_link_share"] is None
    assert not [name for name in ports.columns({}, None, "none") if "busbw" in name], "inside a CUDA graph"
    assert PortMeter().columns({"dispatch_ms": 1.0}, None, "none")["local_bytes"] == 0


def test_the_device_sleeps_and_meets_before_the_clock_starts_and_only_the_work_counts():
    cuda = Cuda()

    def work() -> None:
        assert not cuda.log, "nothing has run while the host was launching"
        cuda.launch("kernel", 0.25)
        cuda.launch("kernel", 0.5)

    assert device_ns(work, lambda: cuda.launch("meet", 3.0), cuda) == 750_000
    assert cuda.log == ["sleep", "meet", "event", "kernel", "kernel", "event"]
    assert device_ns(lambda: cuda.launch("kernel", 1.0), None, cuda) == 1_000_000


def test_cpu_ranks_have_no_devices_to_meet_and_the_plain_timer():
    assert devices_meet(torch.device("cpu")) is None
    for kind in ("batches", "serve"):
        for virtual in (True, False):
            assert type(timer_of(torch.device("cpu"), kind, virtual)) is PhaseTimer


def test_phases_of_an_eager_layer_are_told_apart_by_events_behind_a_sleep():
    cuda = Cuda()
    timer = DeviceTimer(lambda: cuda.launch("meet", 3.0), cuda)

    def layer() -> str:
        timer.start_layer()
        for phase, ms in (("gate", 0.5), ("dispatch", 1.0), ("", 4.0), ("experts", 2.0)):
            assert not cuda.log, "the host never waits inside a layer"
            cuda.launch("kernel", ms)
            timer.lap(phase) if phase else timer.skip()
        cuda.launch("rest", 0.25)
        return "output"

    took_ns, output = timer.clocked(layer)
    assert (took_ns, output) == (7_750_000, "output")
    assert cuda.log == ["sleep", "meet", "event", "event", *["kernel", "event"] * 4, "rest", "event"]
    (laps,) = timer.laps_ns
    assert {phase: ns for phase, ns in laps.items() if ns} == {"gate": 500_000, "dispatch": 1e6, "experts": 2e6}
    assert timer.marks_L == [
        [("", 0), ("gate", 500_000), ("dispatch", 1_500_000), ("", 5_500_000), ("experts", 7_500_000)]
    ]
    timer.reset()
    assert timer.marks_L == []


def test_what_is_skipped_belongs_to_no_phase():
    ticks = iter(range(0, 100, 10))
    timer = PhaseTimer(clock=lambda: next(ticks))
    timer.start_layer()
    timer.lap("gate")
    timer.skip()
    timer.lap("combine")
    assert timer.laps_ns[0]["combine"] == timer.laps_ns[0]["gate"] == 10 and sum(timer.laps_ns[0].values()) == 20
    part = attribute([timer.marks_L], [0])
    assert part.path_L["combine"] == [10] and sum(ns[0] for ns in part.path_L.values()) == 20


def test_attributing_marks_of_several_devices_since_they_met():
    """Rank 1 enters the dispatch 2 ms late: rank 0 waits for it, the exchange itself takes 1 ms."""
    late = [[("", 0), ("gate", int(gate_ms * 1e6)), ("dispatch", 4_000_000)] for gate_ms in (1, 3)]
    part = attribute([[marks] for marks in late], ["gpu 0", "gpu 1"])
    assert part.path_L["gate"] == [3e6] and part.path_L["dispatch"] == [1e6] and part.wait_L == [1e6]
