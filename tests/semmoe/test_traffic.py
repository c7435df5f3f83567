"""Traffic: the fast counting equals the plain one, and every flow's collectives are what DESIGN says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from semmoe.dispatch import DISPATCHERS, DispatchSpec, valid_pairs
from semmoe.errors import UserError
from semmoe.traffic import count_traffic, differences
from semmoe.traffic.locality import LocalityMeter
from semmoe.traffic.wiring import Wiring


def routes(tokens: int, layers: int, slots: int, k: int, ranks: int, seed: int):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, slots)), axis=2)[:, :, :k], rng.integers(0, ranks, (tokens, layers))


def spec(flow: str = "dp", dispatcher: str | None = "a2a_dedup", **changes) -> DispatchSpec:
    return DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=256, top_k=2, **changes)


def test_hand_counted_example():
    # 2 ranks x 2 slots; token 0 at home 0 uses slots 0, 2; token 1 at home 0 uses 2, 3; token 2 at home 1 uses 2, 3
    slots = np.array([[[0, 2]], [[2, 3]], [[2, 3]]])
    traffic = count_traffic(slots, np.array([0, 0, 1]), 4, 2, spec())
    assert traffic.homes_LG.tolist() == [[2, 1]]
    assert traffic.assignment_pairs_LGG.tolist() == [[[1, 3], [0, 2]]]
    assert traffic.rank_pairs_LGG.tolist() == [[[1, 2], [0, 1]]]
    assert traffic.expert_rows_LG.tolist() == [[1, 5]]
    assert traffic.active_experts_LG.tolist() == [[1, 2]]
    meter = LocalityMeter(1, 2)
    meter.add(traffic)
    columns = meter.columns()
    assert columns["lar"] == pytest.approx(3 / 6)
    assert columns["fan_out"] == pytest.approx(2 / 3)
    assert columns["imbalance_total"] == pytest.approx(5 / 3)
    assert columns["home_imbalance"] == pytest.approx(2 / 1.5)
    assert columns["dispatch_bytes"] == 2 * 256 * 2 == columns["combine_bytes"]
    assert columns["metadata_bytes"] == 3 * 8


def collectives(flow: str, dispatcher: str | None, **changes):
    slots, homes = routes(12, 2, 8, 2, 4, 0)
    traffic = count_traffic(slots, None if flow == "tp_replicated" else homes, 8, 4, spec(flow, dispatcher, **changes))
    return traffic, {c.op: c for c in traffic.collectives}


def test_allgather_moves_every_row_everywhere_whatever_the_routes():
    traffic, ops = collectives("dp", "allgather_rs")
    for layer in range(2):
        homes = traffic.homes_LG[layer]
        assert np.array_equal(ops["dispatch"].rows_LGG[layer], np.repeat(homes[:, None], 4, axis=1))
        assert np.array_equal(ops["combine"].rows_LGG[layer], np.repeat(homes[None, :], 4, axis=0))
    assert ops["dispatch"].remote_bytes_L(4).tolist() == [12 * 3 * 512.0] * 2


@pytest.mark.parametrize("dispatcher", DISPATCHERS[1:])
def test_combine_mirrors_dispatch(dispatcher):
    traffic, ops = collectives("dp", dispatcher)
    assert np.array_equal(ops["dispatch"].rows_LGG, ops["combine"].rows_LGG.swapaxes(1, 2))
    expected = traffic.rank_pairs_LGG if dispatcher == "a2a_dedup" else traffic.assignment_pairs_LGG
    assert np.array_equal(ops["dispatch"].rows_LGG, expected)


def test_srs_and_sag_volumes_are_those_of_the_design():
    traffic, ops = collectives("tp_shuffled", "a2a_dedup", carry_expert_ids=True)
    for rank in range(4):
        n_r, total = traffic.homes_LG[0, rank], 12
        srs, sag = ops["srs"].remote_rows_LGG()[0], ops["sag"].remote_rows_LGG()[0]
        assert srs[:, rank].sum() == 3 * n_r and srs[rank].sum() == total - n_r
        assert sag[rank].sum() == 3 * n_r and sag[:, rank].sum() == total - n_r
    assert ops["expert_ids"].row_bytes == 4


def test_replicated_flow_has_two_all_reduces_no_home_and_no_lar():
    traffic, _ = collectives("tp_replicated", None)
    assert [c.op for c in traffic.collectives] == ["all_reduce", "all_reduce"]
    assert traffic.collectives[0].remote_bytes_L(4).tolist() == [2 * 3 * 12 * 512.0] * 2
    assert traffic.expert_rows_LG.sum() == 12 * 2 * 2
    meter = LocalityMeter(2, 4)
    meter.add(traffic)
    assert np.isnan(meter.columns()["lar"]) and np.isnan(meter.columns()["fan_out"])


def test_low_latency_sends_fp8_rows_with_scales_and_returns_activations():
    low = spec("dp", "low_latency")
    assert low.dispatch_row_bytes == 256 + 2 * 4 and low.combine_row_bytes == 512


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_zero_tokens_is_a_batch_of_idle_ranks(flow, dispatcher):
    homes = None if flow == "tp_replicated" else np.zeros((0, 2), int)
    traffic = count_traffic(np.zeros((0, 2, 2), np.int32), homes, 8, 4, spec(flow, dispatcher))
    assert traffic.payload_bytes() == 0
    meter = LocalityMeter(2, 4)
    meter.add(traffic)
    assert np.isnan(meter.columns()["lar"]) and meter.columns()["node_bytes"] == 0


def test_valid_pairs_are_the_table_of_the_design():
    assert len(valid_pairs()) == 4 + 1 + 3 + 3
    for flow, dispatcher in (
        ("tp_scattered", "allgather_rs"),
        ("tp_replicated", "a2a_dedup"),
        ("dp", None),
        ("dpp", None),
        ("dp", "a2a"),
    ):
        with pytest.raises(UserError):
            spec(flow, dispatcher)


def test_bytes_split_into_tiers_add_up():
    slots, homes = routes(50, 2, 8, 2, 4, 3)
    traffic = count_traffic(slots, homes, 8, 4, spec())
    one, two = LocalityMeter(2, 4), LocalityMeter(2, 4, Wiring.plain(4, 2))
    one.add(traffic)
    two.add(traffic)
    assert one.nic_bytes == 0 and two.nic_bytes > 0
    assert one.node_bytes == two.node_bytes + two.nic_bytes == traffic.payload_bytes()


@pytest.mark.parametrize(("flow", "dispatcher"), valid_pairs())
def test_counted_tiers_add_up_and_what_several_ranks_of_a_node_need_crosses_once(flow, dispatcher):
    """Over the NICs: straight rows of a2a_assignment and low_latency, one copy a node of everything else."""
    wiring, dispatch = Wiring.plain(4, 2), spec(flow, dispatcher)
    slots, homes = routes(50, 2, 8, 2, 4, 3)
    traffic = count_traffic(slots, None if flow == "tp_replicated" else homes, 8, 4, dispatch, wiring)
    meter = LocalityMeter(2, 4, wiring)
    meter.add(traffic)
    assert meter.node_bytes + meter.nic_bytes == sum(meter.bytes_by_op.values()) > 0
    if flow == "tp_replicated":
        assert meter.node_bytes + meter.nic_bytes == traffic.payload_bytes() and meter.nic_bytes == 2 * 2 * 100 * 512
        return
    node_TLk, home_TL = slots // 4, np.broadcast_to(homes[:, None], (50, 2)) if homes.ndim == 1 else homes
    away_TLk = node_TLk != home_TL[..., None] // 2
    served = {"a2a_dedup": away_TLk.any(axis=2).sum(), "allgather_rs": 100}.get(dispatcher, away_TLk.sum())
    once = sum(c.row_bytes for c in traffic.collectives if c.op in ("dispatch", "combine")) * served
    around = sum(c.row_bytes for c in traffic.collectives if c.op not in ("dispatch", "combine")) * 100
    assert meter.nic_bytes == once + around


def test_differences_finds_one_lost_row():
    slots, homes = routes(30, 2, 8, 2, 4, 5)
    traffic = count_traffic(slots, homes, 8, 4, spec())
    assert differences(traffic, traffic) == []
    lost = traffic.assignment_pairs_LGG.copy()
    lost[1, 2, 3] -= 1
    assert any(
        "assignment_pairs_LGG[1, 2, 3]" in d for d in differences(traffic, replace(traffic, assignment_pairs_LGG=lost))
    )
    shorter = replace(traffic.collectives[0], rows_LGG=traffic.collectives[0].rows_LGG - 1)
    assert differences(traffic, replace(traffic, collectives=(shorter, traffic.collectives[1]))) == [
        "dispatch.rows_LGG differs"
    ]
