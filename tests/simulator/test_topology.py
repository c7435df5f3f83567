"""Topology: links of each kind of machine, and the fast port counts against loads summed over the graph's paths."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_kit import cluster

from semmoe.errors import UserError
from simulator.cost.loads import hierarchical_loads, loads_of, node_copies
from simulator.topology import Topology


def random_rows(ranks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (3, ranks, ranks))


def off_diagonal(rows_LGG: np.ndarray) -> np.ndarray:
    return rows_LGG * (1 - np.eye(rows_LGG.shape[1], dtype=int))


def test_switch_ports_carry_egress_and_ingress():
    topology, rows = Topology.of(cluster(4), 4), random_rows(4)
    loads = topology.loads("port", rows)
    remote = off_diagonal(rows)
    expected = np.concatenate([remote.sum(axis=2), remote.sum(axis=1)], axis=1)
    assert sorted(loads[0]) == sorted(expected[0]) and loads.shape == (3, 8)
    assert loads_of(rows, 4).port_L == pytest.approx(loads.max(axis=1))


def test_mesh_links_carry_one_pair_each():
    topology, rows = Topology.of(cluster(4, topology="mesh"), 4), random_rows(4)
    loads = topology.loads("mesh", rows)
    assert loads.shape == (3, 12)
    assert loads_of(rows, 4).pair_L == pytest.approx(loads.max(axis=1))


def test_between_nodes_rows_leave_by_the_nic_and_inside_they_do_not():
    topology, rows = Topology.of(cluster(8, nodes=2), 8), random_rows(8)
    loads = loads_of(rows, 4)
    assert loads.nic_L == pytest.approx(topology.loads("nic", rows).max(axis=1))
    assert loads.port_L == pytest.approx(topology.loads("port", rows).max(axis=1))
    inside = rows * topology.same_node_GG
    assert (loads_of(inside, 4).nic_L == 0).all() and topology.loads("nic", inside).max() == 0


def test_self_copies_load_nothing():
    rows = np.eye(4, dtype=np.int64)[None] * 100
    loads = loads_of(rows, 4)
    assert loads.port_L == loads.pair_L == loads.nic_L == 0 and not loads.skewed


def test_links_carry_their_capacity():
    graph = Topology.of(cluster(8, nodes=2), 8).graph
    assert {(d["tier"], d["gbps"]) for *_, d in graph.edges(data=True)} == {("port", 1.0), ("nic", 0.5)}


def test_hierarchical_rows_cross_once_and_are_forwarded_by_the_rank_of_the_same_place():
    rows = np.zeros((1, 4, 4), dtype=np.int64)
    rows[0, 0, 2] = rows[0, 0, 3] = 10  # ten tokens of rank 0 that both ranks of node 1 serve
    copies = np.zeros((1, 4, 2), dtype=np.int64)
    copies[0, 0, 1] = 10
    once = hierarchical_loads(rows, copies, 2)
    assert once.nic_L == 10 and once.pair_L == 10, "ten rows over the NIC to rank 2, which passes ten on to rank 3"
    assert hierarchical_loads(rows, None, 2).nic_L == 20, "unknown copies: an upper bound"
    assert loads_of(rows, 2).nic_L == 20, "flat: one row a destination"


def test_node_copies_count_each_remote_node_of_a_token_once():
    slots = np.array([[[4, 6]], [[4, 0]], [[1, 2]]])  # 8 slots, 4 ranks, 2 nodes: node 1 holds slots 4..7
    homes = np.array([[0], [0], [3]])
    copies = node_copies(slots, homes, 8, 4, 2)
    assert copies[0].tolist() == [[1, 2], [0, 0], [0, 0], [1, 0]]


def test_more_ranks_than_the_cluster_has_are_refused():
    with pytest.raises(UserError, match="ep_size=9 on cluster hand, which has 4"):
        Topology.of(cluster(4), 9)
