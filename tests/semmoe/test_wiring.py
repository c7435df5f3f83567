"""Wiring and ports: which link a row crosses, by hand and against paths on the topology's graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec
from semmoe.traffic.ports import gathered_ports, relayed_ports, straight_ports
from semmoe.traffic.route_counts import node_copies
from semmoe.traffic.wiring import Wiring


def cluster(nodes: int, ranks_per_node: int, **changes) -> ClusterSpec:
    fields = {"name": "hand", "topology": "switch", "memory_gib": 80, "memory_gbps": 1000, "bf16_tflops": 100}
    fields |= {"link_gbps": 1.0, "alpha_us": 10, "nic_gbps": 0.5, "nodes": nodes, "ranks_per_node": ranks_per_node}
    return ClusterSpec.from_dict(fields | changes)


def test_rails_and_racks_by_hand():
    rail = Wiring.of(cluster(4, 2, fabric="rail", nodes_per_leaf=2), 8)
    assert rail.nic_G.tolist() == list(range(8)) and rail.leaf_N.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    rack = Wiring.of(cluster(4, 2, fabric="rack", nodes_per_leaf=2), 8)
    assert rack.leaf_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (rail.leaf_groups, rack.leaf_groups, Wiring.of(cluster(4, 2), 8).leaf_groups) == (2, 2, 1)


def test_neighbours_share_a_nic_and_a_rank_may_have_several():
    few, many = cluster(2, 4, nics_per_node=2), cluster(2, 4, nics_per_node=8)
    assert Wiring.of(few, 8).nic_G.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Wiring.of(many, 8).nic_G.tolist() == list(range(8))
    assert (few.nic_bundle_gbps, many.nic_bundle_gbps, cluster(2, 4).nic_bundle_gbps) == (0.5, 1.0, 0.5)


def test_the_worked_example_of_the_module():
    rows, copies = np.zeros((1, 4, 4), dtype=np.int64), np.zeros((1, 4, 2), dtype=np.int64)
    rows[0, 0, 2:] = copies[0, 0, 1] = 10  # ten tokens of rank 0 that both ranks of node 1 serve
    wiring = Wiring.plain(4, 2)
    straight, once = straight_ports(rows, wiring), relayed_ports(rows, copies, wiring)
    assert (straight.nic_rows_L, straight.node_rows_L) == (20, 0)
    assert (once.nic_rows_L, once.node_rows_L) == (10, 10)
    assert once.in_LN.tolist() == [[0, 0, 10, 0]] and once.near_LGI[0, 2].tolist() == [10, 10]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(2, 4, 8), (3, 2, 6), (3, 4, 10), (1, 4, 4)]),
    st.sampled_from(["flat", "rail", "rack"]),
    st.sampled_from([1, 2, 0]),
    st.integers(0, 99),
)
def test_what_leaves_arrives_on_every_tier_and_the_way_back_mirrors_it(shape, fabric, nics, seed):
    nodes, inner, ranks = shape
    wiring = Wiring.of(cluster(nodes, inner, fabric=fabric, nics_per_node=nics, nodes_per_leaf=1), ranks)
    rng = np.random.default_rng(seed)
    slots = np.argsort(rng.random((40, 2, 2 * ranks)), axis=2)[:, :, :3]
    homes = rng.integers(0, ranks, (40, 2))
    rows = np.zeros((2, ranks, ranks), dtype=np.int64)
    for t, layer in np.ndindex(40, 2):
        rows[layer, homes[t, layer], np.unique(slots[t, layer] // 2)] += 1
    copies = node_copies(slots, homes, 2 * ranks, ranks, inner)
    for ports in (straight_ports(rows, wiring), relayed_ports(rows, copies, wiring)):
        assert (ports.out_LN.sum(axis=1) == ports.in_LN.sum(axis=1)).all()
        assert (ports.up_LF.sum(axis=1) == ports.down_LF.sum(axis=1)).all()
        assert (ports.spine_rows_L <= ports.nic_rows_L).all() and (fabric != "flat" or not ports.spine_rows_L.any())
        back = ports.reversed()
        assert (back.in_LN == ports.out_LN).all() and (back.reversed().near_LGI == ports.near_LGI).all()
        assert (back.node_rows_L == ports.node_rows_L).all()
    remote = rows * (1 - np.eye(ranks, dtype=int))
    straight, once = straight_ports(rows, wiring), relayed_ports(rows, copies, wiring)
    assert (straight.node_rows_L + straight.nic_rows_L == remote.sum(axis=(1, 2))).all()
    assert (once.nic_rows_L <= straight.nic_rows_L).all()


@pytest.mark.parametrize("shape", [(2, 4, 8), (3, 4, 10), (1, 4, 4)])
def test_gathered_rows_are_relayed_rows_to_everybody(shape):
    nodes, inner, ranks = shape
    wiring, homes = Wiring.of(cluster(nodes, inner, fabric="rail"), ranks), np.arange(1, ranks + 1)[None]
    everywhere = np.broadcast_to(homes[:, :, None], (1, ranks, ranks))
    slow = relayed_ports(everywhere, np.broadcast_to(homes[:, :, None], (1, ranks, nodes)), wiring)
    fast = gathered_ports(homes, wiring)
    for name in ("near_LGI", "out_LN", "in_LN", "up_LF", "down_LF"):
        assert (getattr(fast, name) == getattr(slow, name)).all(), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fabric": "rails"}, "fabric 'rails'"),
        ({"nics_per_node": 3}, "nics_per_node=3 must divide"),
        ({"oversubscription": 0.5}, "at least 1"),
        ({"nodes_per_leaf": -1}, "must not be negative"),
    ],
)
def test_impossible_fabrics_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        cluster(2, 4, **change)
