"""DeepEP's normal mode prices a2a_dedup where its rows were measured: by its law, by what the exchange really carries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_kit import cluster, presets, price, spec, traffic_of

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.traffic import count_traffic
from simulator.cost.collectives import CollectiveCost
from simulator.cost.deepep import DeepEPLaw, NormalMode
from simulator.validation.deepep import even_exchange_us
from simulator.validation.deepep_law import near_copies, remote_units

LAW = {"floor_us": 20.0, "link_gbps": 1.0}
NORMAL = {"sms": 20, "ranks_per_node": 4, "nodes": 2, "node": {"dispatch": LAW, "combine": LAW}}
NORMAL |= {"between": {op: LAW | {"sm_gbps": 0.1, "doubling_us": 5.0} for op in ("dispatch", "combine")}}
EVEN = np.array([[0, 10, 10, 10], [10, 0, 10, 10], [10, 10, 0, 10], [10, 10, 10, 0]])
DEDUP = spec(dispatcher="a2a_dedup")


def normal(ranks=4, nodes=1, **changes):
    return cluster(ranks, nodes, deepep={"normal": NORMAL | changes})


def test_the_worked_example_of_the_module():
    law = DeepEPLaw(**presets()["h100x8"].deepep["normal"]["node"]["dispatch"])
    port_bytes = 128 * remote_units(256, 8, 8) * 7392
    assert law.time_us(port_bytes, 7392, 128, 20) == pytest.approx(43, abs=0.5)
    assert port_bytes == pytest.approx(4.4e6, rel=0.01)


def test_the_busiest_port_rules_and_without_rows_the_fixed_times_remain():
    hot = EVEN.copy()
    hot[0, 3] += 20  # rank 0 sends 50 rows of 1000 bytes, rank 3 receives 50
    for rows, us in ((EVEN, 50), (hot, 70), (hot.T, 70), (0 * EVEN, 20), (np.diag([99] * 4), 20)):
        times, cost = price(traffic_of("dispatch", rows), normal(), DEDUP)
        assert times["dispatch"] == pytest.approx(us), rows
    assert cost.marks == {"fitted"}
    assert "skew_unvalidated" in price(traffic_of("dispatch", hot), normal(), DEDUP)[1].marks


def test_the_narrowest_of_links_sms_and_nics_rules_over_nodes():
    """4 ranks on 2 nodes; 10 rows to every rank: 10 near, 20 through the NIC of 0.5 GB/s, SMs at 2 GB/s."""
    times, cost = price(traffic_of("dispatch", EVEN), normal(4, 2), DEDUP)
    assert times["dispatch"] == pytest.approx(20 + 5 + (10**4 + 5**4 + 40**4) ** 0.25)
    assert cost.marks == {"fitted", "extrapolated"}, "two ranks a node were not measured"
    assert "extrapolated" not in price(traffic_of("dispatch", EVEN), normal(), DEDUP)[1].marks


def test_what_is_measured_closer_to_the_engine_comes_first():
    own = {"op": "dispatch.a2a_dedup", "ranks": 4, "bytes": [1e3, 1e6], "latency_us": [300.0, 400.0]}
    calibrated = cluster(deepep={"normal": NORMAL}, curves=[own])
    times, cost = price(traffic_of("dispatch", EVEN), calibrated, DEDUP)
    assert times["dispatch"] > 100 and cost.marks == {"interpolated"}, "50 us by the law"
    plain = price(traffic_of("dispatch", EVEN), normal(), spec(dispatcher="a2a_assignment"))[0]["dispatch"]
    assert plain == price(traffic_of("dispatch", EVEN), cluster(), spec(dispatcher="a2a_assignment"))[0]["dispatch"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"sms": 0}, "sms=0 must be positive"), ({"node": {"dispatch": LAW}}, "node lacks combine"),
     ({"node": {"dispatch": {"floor_us": 1}, "combine": LAW}}, r"node\.dispatch lacks link_gbps"),
     ({"node": {"dispatch": LAW | {"fllor": 1}, "combine": LAW}}, "unknown fllor"),
     ({"node": 3}, "lacks dispatch, combine"), ({"sms": "x"}, "sms='x' is no number"),
     ({"node": {"dispatch": LAW | {"floor_us": "a"}, "combine": LAW}}, "floor_us='a' is no number")],
)  # fmt: skip
def test_a_cluster_file_with_half_a_law_is_explained(changes, words):
    with pytest.raises(UserError, match=words):
        NormalMode(normal(**changes), 4, 1)


OTHERS = {"h200x8": "transferred", "h800x8": "transferred", "h20x8": "transferred", "gb200x72": "extrapolated"}


@pytest.mark.parametrize("name", ["h100x8", "h100x16", "h100x32", "b200x8", *OTHERS])
def test_presets_price_a2a_dedup_by_deepep_and_say_whose_rows(name):
    made = presets()[name]
    cost = CollectiveCost(made, DEDUP, made.ranks, 1)
    assert cost._library.marks == {"fitted", OTHERS.get(name, "fitted")}
    assert "fitted to" in made.provenance["deepep"]


@pytest.mark.parametrize("name", ["a100x8", "l40sx8", "mi300x8", "ascend910bx8", "local"])
def test_where_deepep_does_not_run_curves_price(name):
    made = presets()[name]
    assert CollectiveCost(made, DEDUP, made.ranks, 1)._library is None


@pytest.mark.parametrize(("name", "nodes"), [("h100x8", 1), ("h100x16", 2), ("h100x32", 4)])
def test_even_routes_load_ports_as_the_fit_assumed(name, nodes):
    """The rows that the fit counts by formula are those that Traffic counts from routes."""
    made, tokens, experts = presets()[name], 256, 256
    wide = DispatchSpec(flow="dp", dispatcher="a2a_dedup", hidden=7168, top_k=8, dispatch_dtype="fp8")
    cost, rng = CollectiveCost(made, wide, made.ranks, experts // made.ranks), np.random.default_rng(0)
    chosen = np.argpartition(rng.random((tokens * made.ranks, 1, experts)), 8, axis=2)[:, :, :8]
    homes = np.repeat(np.arange(made.ranks), tokens)
    seen = {}
    cost._library.time_us = lambda op, port, nic, *_: seen.update({op: (port[0], nic[0])}) or np.zeros(1)
    cost.phases_us(count_traffic(chosen, homes, experts, made.ranks, wide, cost.wiring))
    port, nic = seen["dispatch"]
    assert port / 7392 == pytest.approx(tokens * near_copies(experts, 8, made.ranks, nodes), rel=0.1)
    assert nic / 7392 == pytest.approx(tokens * remote_units(experts, 8, nodes) if nodes > 1 else 0, rel=0.05)


# dispatch + combine measured on H100 with even routes, us by tokens a rank: hidden 7168, top-8 of 256, FP8 out, 20 SMs
# [ai-dynamo/aiconfigurator@095f58a5], telling sizes included
MEASURED = {
    "h100x8": {16: 80.3, 128: 132.6, 1024: 465.0},
    "h100x16": {16: 155.5, 128: 279.7, 1024: 962.5},
    "h100x32": {128: 435.7, 1024: 1612.6},
}


@pytest.mark.parametrize("name", MEASURED)
def test_presets_give_the_measured_exchanges_again(name):
    us = np.array(list(MEASURED[name].values()))
    wide = DispatchSpec(flow="dp", dispatcher="a2a_dedup", hidden=7168, top_k=8, dispatch_dtype="fp8")
    assert np.abs(even_exchange_us(presets()[name], wide, list(MEASURED[name])) / us - 1).max() < 0.12
    curves = replace(presets()[name], deepep={})
    assert np.abs(even_exchange_us(curves, wide, [128]) / MEASURED[name][128] - 1) > 0.25, "control: NCCL's curves"
