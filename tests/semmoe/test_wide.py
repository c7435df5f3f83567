"""Traffic over many ranks: port sums say what the pair matrices say, in every flow and dispatcher."""

from __future__ import annotations

import numpy as np
import pytest

import semmoe.wiring
from semmoe.dispatch import DispatchSpec, valid_pairs
from semmoe.locality import LocalityMeter
from semmoe.traffic import count_traffic
from semmoe.wide import WideTraffic
from semmoe.wiring import Wiring

RANKS, INNER, SLOTS = 12, 4, 24
WIRING = Wiring(RANKS, INNER, np.arange(RANKS) // 2, np.arange(RANKS // 2) % 2)  # two ranks a NIC, two rails


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
@pytest.mark.parametrize("tokens", [70, 0])
def test_sums_by_port_are_the_sums_over_pairs(flow, dispatcher, tokens, monkeypatch):
    rng = np.random.default_rng(0)
    slots = np.argsort(rng.random((tokens, 2, SLOTS)), axis=2)[:, :, :3].astype(np.int32)
    homes = None if flow == "tp_replicated" else rng.integers(0, RANKS, (tokens, 2))
    spec = DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=64, top_k=3, carry_expert_ids=flow == "tp_shuffled")
    pairs, meter = count_traffic(slots, homes, SLOTS, RANKS, spec, WIRING), LocalityMeter(2, RANKS, WIRING)
    meter.add(pairs)
    monkeypatch.setattr(semmoe.wiring, "PAIRS_UP_TO", 8)
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
