"""Traffic over many ranks: port sums say what the pair matrices say, in every flow and dispatcher."""

from __future__ import annotations

import numpy as np
import pytest

import semmoe.traffic.wiring
from semmoe.dispatch import DispatchSpec, valid_pairs
from semmoe.placement.base import Placement
from semmoe.replica_router import Local
from semmoe.traffic import count_trace_rows, count_traffic, differences
from semmoe.traffic.locality import LocalityMeter
from semmoe.traffic.wide import WideTraffic
from semmoe.traffic.wiring import Wiring

RANKS, INNER, SLOTS = 12, 4, 24
WIRING = Wiring(RANKS, INNER, np.arange(RANKS) // 2, np.arange(RANKS // 2) % 2)  # two ranks a NIC, two rails


@pytest.mark.parametrize("dispatcher", ["allgather_rs", "a2a_assignment", "a2a_dedup", "low_latency"])
@pytest.mark.parametrize(("ranks", "slots"), [(12, 24), (10, 10), (8, 32)])
def test_counted_straight_from_a_trace_is_what_the_routed_slots_are(dispatcher, ranks, slots, monkeypatch):
    """Replicas and none, one slot a rank and several, a last node that is not full."""
    monkeypatch.setattr(semmoe.traffic.wiring, "PAIRS_UP_TO", 4)
    rng, experts = np.random.default_rng(1), min(slots, 20)
    routes = np.argsort(rng.random((50, 2, experts)), axis=2)[:, :, :3].astype(np.int16)
    placement = Placement(np.stack([rng.permutation(slots) % experts for _ in range(2)]), ranks, (0, 1), experts)
    spec, wiring = DispatchSpec(flow="dp", dispatcher=dispatcher, hidden=64, top_k=3), Wiring.plain(ranks, 4)
    rows, homes = rng.integers(0, 50, 70), rng.integers(0, ranks, 70)
    slots_TLk = Local().slots_of_layers(routes, rows, np.repeat(homes[:, None], 2, axis=1), placement)
    straight = count_trace_rows(routes, rows, homes, placement, spec, wiring)
    routed = count_traffic(slots_TLk, homes, slots, ranks, spec, wiring)
    assert differences(straight, routed) == [] and isinstance(straight, WideTraffic)
    assert (straight.exchanged_rows_LG() == routed.exchanged_rows_LG()).all()
    for ours, theirs in zip(straight.collectives, routed.collectives, strict=True):
        for name in ("near_LGI", "out_LN", "in_LN", "up_LF", "down_LF"):
            assert (getattr(ours.ports(wiring), name) == getattr(theirs.ports(wiring), name)).all(), name


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
@pytest.mark.parametrize("tokens", [70, 0])
def test_sums_by_port_are_the_sums_over_pairs(flow, dispatcher, tokens, monkeypatch):
    rng = np.random.default_rng(0)
    slots = np.argsort(rng.random((tokens, 2, SLOTS)), axis=2)[:, :, :3].astype(np.int32)
    homes = None if flow == "tp_replicated" else rng.integers(0, RANKS, (tokens, 2))
    spec = DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=64, top_k=3, carry_expert_ids=flow == "tp_shuffled")
    pairs, meter = count_traffic(slots, homes, SLOTS, RANKS, spec, WIRING), LocalityMeter(2, RANKS, WIRING)
    meter.add(pairs)
    monkeypatch.setattr(semmoe.traffic.wiring, "PAIRS_UP_TO", 8)
    wide, wide_meter = count_traffic(slots, homes, SLOTS, RANKS, spec, WIRING), LocalityMeter(2, RANKS, WIRING)
    wide_meter.add(wide)
    assert isinstance(wide, WideTraffic) or flow == "tp_replicated"
    assert wide_meter.columns() == pytest.approx(meter.columns(), nan_ok=True)
    for name in ("homes_LG", "expert_rows_LG", "active_experts_LG"):
        assert (getattr(wide, name) == getattr(pairs, name)).all(), name
    assert (wide.exchanged_rows_LG() == pairs.exchanged_rows_LG()).all()
    assert wide.metadata_bytes == pairs.metadata_bytes
    for ours, theirs in zip(wide.collectives, pairs.collectives, strict=True):
        assert (ours.op, ours.row_bytes) == (theirs.op, theirs.row_bytes)
        if ours.op != "all_reduce":
            a, b = ours.ports(WIRING), theirs.ports(WIRING)
            for name in ("near_LGI", "out_LN", "in_LN", "up_LF", "down_LF"):
                assert (getattr(a, name) == getattr(b, name)).all(), (ours.op, name)
