"""Topology: links of each kind of machine, and the fast port counts against loads summed over the graph's paths."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_kit import cluster, spec

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec
from semmoe.traffic.collective import Collective
from semmoe.traffic.ports import straight_ports
from semmoe.traffic.route_counts import node_copies
from semmoe.traffic.wiring import Wiring
from simulator.cost.flow_level import FlowCost
from simulator.cost.loads import Loads, loads_of, loads_of_ports
from simulator.topology import Topology


def random_rows(ranks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (3, ranks, ranks))


def off_diagonal(rows_LGG: np.ndarray) -> np.ndarray:
    return rows_LGG * (1 - np.eye(rows_LGG.shape[1], dtype=int))


def loads(rows_LGG: np.ndarray, made: ClusterSpec) -> Loads:
    return loads_of(Collective("dispatch", 1.0, rows_LGG), Wiring.of(made, rows_LGG.shape[1]))


def test_switch_ports_carry_egress_and_ingress():
    topology, rows = Topology.of(cluster(4), 4), random_rows(4)
    on_graph = topology.loads("port", rows)
    remote = off_diagonal(rows)
    expected = np.concatenate([remote.sum(axis=2), remote.sum(axis=1)], axis=1)
    assert sorted(on_graph[0]) == sorted(expected[0]) and on_graph.shape == (3, 8)
    assert loads(rows, cluster(4)).port_L == pytest.approx(on_graph.max(axis=1))


def test_mesh_links_carry_one_pair_each():
    made, rows = cluster(4, topology="mesh"), random_rows(4)
    on_graph = Topology.of(made, 4).loads("mesh", rows)
    assert on_graph.shape == (3, 12)
    assert loads(rows, made).pair_L == pytest.approx(on_graph.max(axis=1))


FABRICS = {
    "flat": {},
    "shared NICs": {"nics_per_node": 2},
    "two NICs a rank": {"nics_per_node": 8},
    "rail": {"fabric": "rail"},
    "rail in two pods": {"fabric": "rail", "nodes_per_leaf": 2},
    "rack": {"fabric": "rack", "nodes_per_leaf": 1, "oversubscription": 2.0},
}


@pytest.mark.parametrize("changes", FABRICS.values(), ids=FABRICS)
@pytest.mark.parametrize("ranks", [16, 14])
def test_fast_counts_are_the_loads_of_paths_on_the_graph(changes, ranks):
    """Straight and relayed, on every fabric, the last node full or not."""
    made = cluster(16, nodes=4, **changes)
    topology, wiring = Topology.of(made, ranks), Wiring.of(made, ranks)
    rng = np.random.default_rng(1)
    slots = np.argsort(rng.random((60, 2, 2 * ranks)), axis=2)[:, :, :4]
    homes = rng.integers(0, ranks, (60, 2))
    rows = np.zeros((2, ranks, ranks), dtype=np.int64)
    for t, layer in np.ndindex(60, 2):
        rows[layer, homes[t, layer], np.unique(slots[t, layer] // 2)] += 1
    copies = node_copies(slots, homes, 2 * ranks, ranks, 4)
    relayed = Collective("combine", 1.0, np.ascontiguousarray(rows.swapaxes(1, 2)), copies_LGN=copies)
    for c in (Collective("dispatch", 1.0, rows), relayed):
        hops, fast = FlowCost(made, spec(), ranks, 1).hops_LGG(c), loads_of(c, wiring)
        assert fast.port_L == pytest.approx(topology.loads("port", hops).max(axis=1))
        assert fast.pair_L == pytest.approx((off_diagonal(hops) * topology.same_node_GG).max(axis=(1, 2)))
        assert fast.nic_L == pytest.approx(topology.loads("nic", hops).max(axis=1))
        spine = [e for e in topology.graph.edges(data=True) if e[2]["tier"] == "spine"]
        per_nic = np.array([gbps for *_, data in spine for gbps in [data["gbps"]]]) / made.nic_bundle_gbps
        on_leaf = topology.loads("spine", hops) / (per_nic * made.oversubscription) if spine else np.zeros((2, 1))
        assert fast.leaf_L == pytest.approx(on_leaf.max(axis=1))
        ports = c.ports(wiring)
        for tier, sent, links in (("port", ports.node_rows_L, 2), ("spine", ports.spine_rows_L, 2)):
            assert topology.loads(tier, hops).sum(axis=1) == pytest.approx(links * sent), (
                "every row, once up, once down"
            )
        assert topology.loads("nic", hops).sum(axis=1) == pytest.approx(4 * ports.nic_rows_L)


def test_on_one_node_the_ports_say_what_the_pairs_say():
    rows, wiring = random_rows(6), Wiring.plain(6)
    pairs, ports = loads_of(Collective("sag", 1.0, rows), wiring), loads_of_ports(straight_ports(rows, wiring), wiring)
    for name in ("port_L", "mean_port_L", "pair_L", "nic_L", "leaf_L"):
        assert getattr(pairs, name) == pytest.approx(getattr(ports, name))


def test_self_copies_load_nothing():
    rows = np.eye(4, dtype=np.int64)[None] * 100
    found = loads(rows, cluster(4))
    assert found.port_L == found.pair_L == found.nic_L == 0 and not found.skewed


def test_links_carry_their_capacity():
    graph = Topology.of(cluster(8, nodes=2), 8).graph
    assert {(d["tier"], d["gbps"]) for *_, d in graph.edges(data=True)} == {("port", 1.0), ("nic", 0.5)}
    thin = Topology.of(cluster(8, nodes=2, fabric="rail", nodes_per_leaf=1, oversubscription=4.0, nics_per_node=8), 8)
    gbps = {(d["tier"], d["gbps"]) for *_, d in thin.graph.edges(data=True)}
    assert gbps == {("port", 1.0), ("nic", 1.0), ("spine", 0.25)}


def test_one_rail_needs_no_spine_and_two_do():
    made = cluster(8, nodes=2, fabric="rail")
    rows = np.zeros((1, 8, 8), dtype=np.int64)
    rows[0, 1, 5] = 7  # the same place on the other node
    assert loads(rows, made).leaf_L == 0
    rows[0, 1, 6] = 3
    assert loads(rows, made).leaf_L == 1.5, "three rows over the two NICs of the rail"
    assert loads(rows, cluster(8, nodes=2)).leaf_L == 0


def test_node_copies_count_each_remote_node_of_a_token_once():
    slots = np.array([[[4, 6]], [[4, 0]], [[1, 2]]])  # 8 slots, 4 ranks, 2 nodes: node 1 holds slots 4..7
    homes = np.array([[0], [0], [3]])
    copies = node_copies(slots, homes, 8, 4, 2)
    assert copies[0].tolist() == [[1, 2], [0, 0], [0, 0], [1, 0]]
    many = node_copies(np.array([[[0, 198, 199]]]), np.array([[0]]), 200, 200, 1)
    assert many[0, 0].sum() == 3, "more nodes than a machine word has bits"


def test_more_ranks_than_the_cluster_has_are_refused():
    with pytest.raises(UserError, match="ep_size=9 on cluster hand, which has 4"):
        Topology.of(cluster(4), 9)
