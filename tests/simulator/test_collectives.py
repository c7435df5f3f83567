"""Time of an exchange: the formula by hand on every kind of machine, and refusals where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_kit import cluster, presets, price, spec, traffic_of

from semmoe.dispatch import METADATA_BYTES
from semmoe.errors import UserError
from semmoe.specs import Curve
from semmoe.traffic import count_traffic
from semmoe.traffic.collective import Collective
from simulator.cost.collectives import CollectiveCost

EVEN = np.full((4, 4), 10)  # every rank sends 10 rows to each other; 1000 bytes a row


def test_alpha_beta_by_hand():
    times, cost = price(traffic_of("dispatch", EVEN), cluster())
    assert times == {"dispatch": pytest.approx(10 + 3 * 10 * 1000 / 1000)}
    assert cost.marks == {"fitted"}


def test_the_busiest_port_counts_whether_it_sends_or_receives():
    rows = np.zeros((4, 4), dtype=int)
    rows[0, 1:] = 10
    out, cost = price(traffic_of("dispatch", rows), cluster())
    into, _ = price(traffic_of("dispatch", rows.T), cluster())
    assert out == into == {"dispatch": pytest.approx(10 + 30)}
    assert "skew_unvalidated" in cost.marks


def test_calibrated_skew_is_not_marked():
    rows = np.zeros((4, 4), dtype=int)
    rows[0, 1] = 10
    _, cost = price(traffic_of("dispatch", rows), cluster(skew={"dispatch.port": 1.0}))
    assert "skew_unvalidated" not in cost.marks


def test_measured_weights_of_port_and_pair_rule_where_there_are_any():
    """Law and worked example of harness/calibration/skew.py: mean 60, busiest port 120, hottest pair 40 rows."""
    rows = np.array([[0, 20, 20, 20], [40, 0, 10, 10], [40, 10, 0, 10], [40, 10, 10, 0]])
    for skew, even_rows in (({"dispatch.port": 0.5}, 90), ({"dispatch.port": 0.0}, 60), ({"dispatch.port": 1.0}, 120)):
        times, _ = price(traffic_of("dispatch", rows), cluster(skew=skew))
        assert times["dispatch"] == pytest.approx(10 + even_rows)
    rows = np.array([[0, 20, 20, 20], [60, 0, 0, 0], [20, 20, 0, 20], [20, 20, 20, 0]])  # port 100, 3 * 60 - 100 beyond
    times, _ = price(traffic_of("dispatch", rows), cluster(skew={"dispatch.port": 0.5, "dispatch.pair": 0.25}))
    assert times["dispatch"] == pytest.approx(10 + 60 + 0.5 * 40 + 0.25 * 80)


def curves(*points: tuple[str, int, float]) -> list[Curve]:
    """Curves of 1 us per KiB in nccl-tests' count over a floor, in `points` (op, ranks, floor)."""
    sizes = tuple(float(1 << e) for e in range(8, 30))
    return [Curve(op=op, ranks=n, bytes=sizes, latency_us=[f + s / 1024 for s in sizes]) for op, n, f in points]


def test_curve_is_read_at_the_equivalent_size():
    made = cluster(curves=curves(("alltoall", 4, 5.0)))
    times, cost = price(traffic_of("dispatch", EVEN, row_bytes=1024.0), made)
    size_kib = 30 * 4 / 3  # egress 30 KiB, S_eq = egress * n / (n - 1)
    assert times["dispatch"] == pytest.approx(5 + size_kib, rel=0.01)
    assert cost.marks == {"interpolated"}


def test_one_hot_pair_is_bound_by_the_curve_of_two_ranks_on_a_switch():
    rows = np.zeros((4, 4), dtype=int)
    rows[0, 1] = 1024
    slow_pair = [replace(c, latency_us=tuple(3 * us for us in c.latency_us)) for c in curves(("alltoall", 2, 1.0))]
    made = cluster(curves=[*curves(("alltoall", 4, 5.0)), *slow_pair])
    times, _ = price(traffic_of("dispatch", rows, row_bytes=1024.0), made)
    assert times["dispatch"] == pytest.approx(3 * (1 + 2 * 1024), rel=0.01)


def test_a_hot_pair_on_a_mesh_has_one_link_and_on_a_switch_the_whole_port():
    rows = np.zeros((4, 4), dtype=int)
    rows[0, 1] = 30
    on_mesh, _ = price(traffic_of("dispatch", rows), cluster(topology="mesh", mesh_link_gbps=1 / 3))
    on_switch, _ = price(traffic_of("dispatch", rows), cluster())
    assert on_mesh["dispatch"] == pytest.approx(10 + 30 * 3) and on_switch["dispatch"] == pytest.approx(10 + 30)
    even_mesh, _ = price(traffic_of("dispatch", EVEN), cluster(topology="mesh", mesh_link_gbps=1 / 3))
    even_switch, _ = price(traffic_of("dispatch", EVEN), cluster())
    assert even_mesh == even_switch, "even traffic fills all links: the kind of machine does not matter"


def test_two_nodes_wait_for_the_slower_tier():
    made = cluster(4, nodes=2)  # NIC: 20 us + 0.5 GB/s
    near = np.zeros((4, 4), dtype=int)
    near[0, 1] = 10
    far = np.zeros((4, 4), dtype=int)
    far[0, 2] = 10
    assert price(traffic_of("dispatch", far), made)[0]["dispatch"] == pytest.approx(20 + 10 * 2)
    assert price(traffic_of("dispatch", 10 * near), made)[0]["dispatch"] == pytest.approx(10 + 100)
    assert price(traffic_of("dispatch", near + far), made)[0]["dispatch"] == pytest.approx(40)


def test_all_gather_between_nodes_sends_one_copy_a_node():
    made, homes = cluster(4, nodes=2), np.full((1, 4), 5)
    outward = np.broadcast_to(homes[:, :, None], (1, 4, 4))
    once = Collective("all_gather", 1000.0, outward, copies_LGN=np.broadcast_to(homes[:, :, None], (1, 4, 2)))
    traffic = replace(traffic_of("all_gather", outward[0]), collectives=(once,))
    times, _ = price(traffic, made, spec("tp_scattered", "a2a_assignment"))
    assert times["sag"] == pytest.approx(max(20 + 5 * 2, 10 + 5 + 5 * 1)), "one copy by NIC, two ranks' rows inside"


def test_all_reduce_by_hand_inside_and_between_nodes():
    buffer = np.array([40])
    reduce = Collective("all_reduce", 1000.0, buffer_rows_L=buffer)
    traffic = replace(traffic_of("dispatch", EVEN), collectives=(reduce, reduce))
    replicated = spec("tp_replicated", None)
    times, _ = price(traffic, cluster(), replicated)
    assert times == {"srs": pytest.approx(10 + 1.5 * 40), "sag": pytest.approx(10 + 1.5 * 40)}
    times, _ = price(traffic, cluster(4, nodes=2), replicated)
    inside, across = 10 + 1.0 * 40, 20 + (1.0 * 40 / 2) / 0.5
    assert times["srs"] == pytest.approx(inside + across)


def test_metadata_and_the_exchange_of_sizes_are_paid_in_the_dispatch():
    traffic = traffic_of("dispatch", EVEN)
    fixed, _ = price(traffic, cluster(), spec(dispatcher="low_latency"))
    sized, _ = price(replace(traffic, metadata_bytes=120.0 * METADATA_BYTES), cluster(), spec())
    assert sized["dispatch"] - fixed["dispatch"] == pytest.approx(10 + 30 * METADATA_BYTES / 1000)


def test_expert_ids_travel_with_the_all_gather_and_cost_no_collective_of_their_own():
    outward = np.full((1, 4, 4), 5)
    sag, ids = Collective("sag", 1000.0, outward), Collective("expert_ids", 4.0, outward)
    both = replace(traffic_of("sag", EVEN), collectives=(sag, ids))
    times, _ = price(both, cluster(), spec("tp_shuffled", "a2a_dedup"))
    assert times == {"sag": pytest.approx(10 + 15 * 1.004)}


def test_allgather_rs_costs_exactly_the_same_for_every_placement():
    rng = np.random.default_rng(0)
    slots = np.argsort(rng.random((64, 3, 8)), axis=2)[:, :, :2]
    homes = rng.integers(0, 8, 64)
    dispatch = spec(dispatcher="allgather_rs")
    seen = set()
    for seed in range(4):
        moved = np.random.default_rng(seed).permutation(8)[slots]
        cost = CollectiveCost(presets()["h100x8"], dispatch, 8, 1)
        times = cost.phases_us(count_traffic(moved, homes, 8, 8, dispatch))
        seen.add((times["dispatch"].tobytes(), times["combine"].tobytes()))
    assert len(seen) == 1
    other = spec(dispatcher="a2a_dedup")
    a2a = {
        CollectiveCost(presets()["h100x8"], other, 8, 1)
        .phases_us(count_traffic(np.random.default_rng(s).permutation(8)[slots], homes, 8, 8, other))["dispatch"]
        .tobytes()
        for s in range(4)
    }
    assert len(a2a) > 1, "control: the all-to-all does depend on the placement"


def test_ranks_that_share_cores_wait_for_the_mean_load_where_one_is_hot():
    rows = np.zeros((4, 4), dtype=int)
    rows[0, 1:] = 10
    shared = cluster(topology="shared_memory", cores=1)
    combine = spec(dispatcher="a2a_dedup")
    assert price(traffic_of("combine", rows), shared, combine)[0]["combine"] == pytest.approx(10 + 7.5)
    assert price(traffic_of("combine", EVEN), shared, combine)[0]["combine"] == pytest.approx(10 + 30)


def test_fixed_places_on_cpu_cost_the_same_however_full_they_are():
    shared, sparse = cluster(topology="shared_memory", cores=1), np.zeros((4, 4), dtype=int)
    full, empty = (price(traffic_of("dispatch", rows), shared)[0]["dispatch"] for rows in (EVEN, sparse))
    places = 5 * 2 * 3  # tokens of a rank x choices that may meet on one rank x other ranks
    assert full == empty == pytest.approx(10 + places)


def test_one_rank_and_no_tokens_exchange_nothing():
    alone = traffic_of("dispatch", np.full((1, 1), 9))
    assert price(alone, cluster(1))[0] == {}
    assert price(replace(traffic_of("dispatch", 0 * EVEN), tokens=0), cluster())[0] == {}


def test_what_nobody_measured_is_refused_unless_rooflines_are_allowed():
    unknown = cluster(alpha_us=0.0, curves=curves(("all_reduce", 4, 1.0)))
    with pytest.raises(UserError, match=r"no curve.*dp/low_latency \(curves held: all_reduce\).*allow_roofline"):
        price(traffic_of("dispatch", EVEN), unknown)
    times, cost = price(traffic_of("dispatch", EVEN), unknown, allow_roofline=True)
    assert times["dispatch"] == pytest.approx(30) and cost.marks == {"roofline"}


def test_low_latency_reads_the_measured_table_at_its_own_points():
    made, hidden, tokens = presets()["h100x8"], 2048, 128
    wide = replace(spec(dispatcher="low_latency"), hidden=hidden, top_k=8)
    rows = np.full((8, 8), tokens)  # 8 choices a token, one on each rank
    pair = (
        Collective("dispatch", wide.dispatch_row_bytes, rows[None]),
        Collective("combine", wide.combine_row_bytes, rows[None]),
    )
    times, cost = price(replace(traffic_of("dispatch", rows), collectives=pair), made, wide)
    assert times == {"dispatch": pytest.approx(17.931), "combine": pytest.approx(25.943)}
    assert cost.marks == {"interpolated"}
    nothing = replace(traffic_of("dispatch", 0 * rows), collectives=(Collective("dispatch", 2112.0, 0 * rows[None]),))
    assert price(nothing, made, wide)[0]["dispatch"] == pytest.approx(10.313), "all local: the floor remains"


def test_low_latency_without_a_table_takes_the_curve_at_fp8_bytes():
    wide = replace(spec(dispatcher="low_latency"), hidden=2048, top_k=8)
    rows = np.full((1, 8, 8), 128)
    traffic = replace(traffic_of("dispatch", rows[0]), collectives=(Collective("dispatch", 2112.0, rows),))
    made = presets()["h200x8"]
    times, cost = price(traffic, made, wide)
    assert times["dispatch"] == pytest.approx(float(cost._curve("dispatch", 8).time_us(8 * 128 * 2112.0)))


def test_exchanges_around_a_layer_cost_what_plain_ones_do_where_the_scheduler_keeps_the_order():
    """Own curves of SRS and SAG for shuffled tokens; a cluster with one of a pair prices both by it."""
    made = cluster(curves=curves(("srs", 4, 400.0), ("reduce_scatter", 4, 300.0), ("all_gather", 4, 200.0)))
    shuffled, kept = (spec("tp_shuffled", keeps_order=kept) for kept in (False, True))
    for op, us, kept_us in (("srs", 400.0, 300.0), ("sag", 200.0, 200.0), ("reduce_scatter", 300.0, 300.0)):
        phase, rows_us = "sag" if op == "sag" else "srs", 30_000 * 4 / 3 / 1024
        assert price(traffic_of(op, EVEN), made, shuffled)[0] == {phase: pytest.approx(us + rows_us, rel=1e-3)}
        assert price(traffic_of(op, EVEN), made, kept)[0] == {phase: pytest.approx(kept_us + rows_us, rel=1e-3)}
