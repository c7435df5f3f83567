"""Flow-level network: fair shares are max-min, bytes are conserved, even traffic agrees with the bottleneck, incast shows."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import simpy
from conftest import make_trace
from simulator_kit import cluster, spec, timer_for, toy_model, traffic_of

from semmoe.errors import UserError
from simulator.cost.collectives import CollectiveCost
from simulator.cost.flow_level import FlowCost
from simulator.cost.model import CostModel
from simulator.flows import FlowNetwork, busiest_link_us, exchange_us, max_min_rates
from simulator.topology import build_graph

SWITCH = build_graph(cluster(4, link_gbps=1.0), 4)


def test_rates_are_max_min_fair():
    """Links of 10, 10, 4; flows over (0), (0, 1), (1, 2), (2): the thin link gives 2 each, the others fill up."""
    links = np.array([[0, -1], [0, 1], [1, 2], [2, -1]])
    rates = max_min_rates(links, np.array([10.0, 10.0, 4.0]))
    np.testing.assert_allclose(rates, [5, 5, 2, 2])


def test_no_flow_can_gain_without_taking_from_a_smaller_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        capacity = rng.uniform(1, 10, 6)
        links = np.stack([rng.permutation(6)[:3] for _ in range(12)])
        rates = max_min_rates(links, capacity)
        load = np.zeros(6)
        np.add.at(load, links.ravel(), np.repeat(rates, 3))
        assert (load <= capacity + 1e-9).all()
        for flow in range(12):
            full = [e for e in links[flow] if load[e] >= capacity[e] - 1e-9]
            rivals = [rates[[e in row for row in links]].max() for e in full]
            assert full and min(rivals) <= rates[flow] + 1e-9, "some full link on which it is among the fastest"


def test_the_worked_example_of_the_module():
    bytes_GG = np.zeros((4, 4))
    bytes_GG[0, 2] = bytes_GG[1, 2] = bytes_GG[1, 3] = 1e6
    np.testing.assert_allclose(exchange_us(SWITCH, bytes_GG)[[0, 1, 1], [2, 2, 3]], [2000, 2000, 2000])


def test_a_flow_speeds_up_when_its_rival_ends_and_slows_down_when_one_starts():
    env = simpy.Environment()
    network = FlowNetwork(env, SWITCH)
    ends = {}

    def transfer(name, start, target, size):
        yield env.timeout(start)
        yield network.send(("rank", name), ("rank", target), size)
        ends[name] = env.now

    env.process(transfer(0, 0, 3, 1e6))  # alone for 500 us (half done), shares until 1 ends
    env.process(transfer(1, 500, 3, 0.25e6))  # 250 kB at half rate: ends at 1000
    env.run()
    assert ends == pytest.approx({1: 1000.0, 0: 1250.0})
    assert network.bytes_E.sum() == pytest.approx(2 * 1.25e6), "two links each, every byte once"


@pytest.mark.parametrize("nodes", [1, 2])
def test_even_traffic_takes_what_its_busiest_link_needs(nodes):
    graph = build_graph(cluster(8, nodes), 8)
    even = np.full((8, 8), 1e6)
    assert exchange_us(graph, even).max() == pytest.approx(busiest_link_us(graph, even), rel=0.05)


def test_a_mesh_has_a_link_for_every_pair():
    graph = build_graph(cluster(4, topology="mesh", mesh_link_gbps=0.5), 4)
    hot = np.zeros((4, 4))
    hot[:3, 3] = 1e6
    np.testing.assert_allclose(exchange_us(graph, hot)[:3, 3], 2000)


def incast():
    """Ranks 1 and 7 send 1000 rows to rank 4, which is hot; rank 1 owes rank 7 as many, and rank 7 gets more from others."""
    rows = np.zeros((8, 8), dtype=np.int64)
    rows[0, [1, 7]] = 300
    rows[1, [4, 7]] = 1000
    rows[2, [5, 7]] = 1000, 100
    rows[3, 7], rows[5, 6], rows[7, 4] = 300, 100, 1000
    return rows


def test_every_sender_to_a_hot_receiver_waits_for_the_others():
    hot = np.zeros((4, 4))
    hot[1:, 0] = 1e6
    np.testing.assert_allclose(exchange_us(SWITCH, hot)[1:, 0], 3000)
    assert busiest_link_us(SWITCH, hot) == pytest.approx(3000)


def test_incast_holds_up_what_shares_a_port_with_it_and_the_bottleneck_does_not_see_it():
    made = cluster(8, alpha_us=1e-3)
    flow, bottleneck = (kind(made, spec(), 8, 1) for kind in (FlowCost, CollectiveCost))
    one_way = np.zeros((8, 8), dtype=np.int64)
    one_way[1, 0] = 1000
    for rows, congested in ((one_way, False), (np.full((8, 8), 100), False), (incast(), True)):
        traffic = traffic_of("dispatch", rows)
        with_flows, busiest = (cost.phases_us(traffic)["dispatch"][0] for cost in (flow, bottleneck))
        assert with_flows > 1.08 * busiest if congested else with_flows == pytest.approx(busiest, rel=0.05)
    assert "flow_level" in flow.marks and "flow_level" not in bottleneck.marks


def test_a_thin_uplink_between_leaves_is_seen_by_flows():
    leaves = nx.DiGraph()
    for rank in range(4):
        for a, b in ((("rank", rank), ("leaf", rank // 2)), (("leaf", rank // 2), ("rank", rank))):
            leaves.add_edge(a, b, gbps=1.0)
    for a, b in ((("leaf", 0), ("leaf", 1)), (("leaf", 1), ("leaf", 0))):
        leaves.add_edge(a, b, gbps=0.5)
    across = np.zeros((4, 4))
    across[0, 2] = across[1, 3] = 1e6
    assert exchange_us(leaves, across).max() == pytest.approx(4000)


@pytest.mark.parametrize("dispatcher", ["a2a_assignment", "a2a_dedup", "allgather_rs"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_flow_level_is_never_faster_and_close_on_random_routes(dispatcher, nodes):
    trace, made = make_trace(), cluster(4, nodes)
    timers = [timer_for("dp", dispatcher, trace=trace, cluster=made) for _ in range(2)]
    timers[1].cost = CostModel(toy_model(), made, spec("dp", dispatcher), 4, fidelity="flow")
    rows, homes = np.arange(160), np.arange(160) % 4
    for timer in timers:
        timer.run(rows, homes, None)
    for phase in ("dispatch", "combine"):
        ratio = timers[1].timeline.phase_ms(phase) / timers[0].timeline.phase_ms(phase)
        assert (ratio >= 1 - 1e-9).all() and (ratio < 1.3).all()


def test_an_unknown_fidelity_is_refused():
    with pytest.raises(UserError, match="bottleneck or flow"):
        CostModel(toy_model(), cluster(), spec(), 4, fidelity="flows")


FABRICS = {
    "rail": {"fabric": "rail"},
    "rail in two pods, oversubscribed": {"fabric": "rail", "nodes_per_leaf": 2, "oversubscription": 2.0},
    "rack, oversubscribed": {"fabric": "rack", "nodes_per_leaf": 1, "oversubscription": 4.0},
    "shared NICs": {"nics_per_node": 1},
    "two NICs a rank": {"nics_per_node": 8},
}


@pytest.mark.parametrize("changes", FABRICS.values(), ids=FABRICS)
def test_on_every_fabric_even_traffic_takes_what_its_busiest_link_needs_and_incast_is_seen(changes):
    graph = build_graph(cluster(16, nodes=4, **changes), 16)
    even = np.full((16, 16), 1e6)
    assert exchange_us(graph, even).max() == pytest.approx(busiest_link_us(graph, even), rel=0.05)
    hot = np.zeros((16, 16))
    hot[4:, 0] = 1e6  # every rank of the other nodes sends to rank 0
    alone = np.zeros((16, 16))
    alone[4, 0] = 1e6
    assert exchange_us(graph, hot)[4:, 0].min() >= 12 * exchange_us(graph, alone)[4, 0] * (1 - 1e-9), "all wait for all"
