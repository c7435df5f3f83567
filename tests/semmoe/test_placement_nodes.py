"""Ranks to nodes: the rank pairs that talk most share a node; copies over the NICs go down, locality stays."""

from __future__ import annotations

import numpy as np
import pytest
from placement_problems import cluster, problem

from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.placement.nodes import order_by_node
from semmoe.placement.semantic import Semantic
from semmoe.planning import StepPlanner
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.replica_router import Local
from semmoe.schedule.semantic import Semantic as SemanticTokens
from semmoe.sources.synthetic import Synthetic
from semmoe.traffic import count_traffic
from semmoe.traffic.locality import LocalityMeter
from semmoe.traffic.wiring import Wiring


def test_ranks_that_talk_share_a_node() -> None:
    traffic = np.zeros((4, 4))
    traffic[0, 2] = 5.0
    assert order_by_node(traffic, 2).tolist() == [0, 2, 1, 3]
    assert order_by_node(np.zeros((4, 4)), 2).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("home", "slots"), [("token", 16), ("token", 24), ("request", 16)])
def test_nic_bytes_go_down_against_the_flat_placement_and_locality_stays(home: str, slots: int) -> None:
    train, test = (
        Synthetic(
            requests=120, prompt_len=40, output_len=0, num_experts=16, top_k=4, layers=2, groups=2, topics=8,
            vocab_size=256, context_noise=0.2, depth_fade=0.0,
        )
        .make()
        .split(0.5, 0)
    )  # fmt: skip
    table = TokenTable()
    table.fit(Profile.fit(train))

    def measured(placement: Placement) -> dict[str, float]:
        flow = "dp" if home == "request" else "tp_shuffled"
        spec = DispatchSpec(flow=flow, dispatcher="a2a_dedup", hidden=64, top_k=4)
        planner = StepPlanner(test, placement, spec, SemanticTokens(), table, Local(), home_cap=1.1)
        score_RG = np.stack(
            [table.request_scores(test.token_id_T[test.request_T == r], placement) for r in range(test.num_requests)]
        )
        routed = planner.route(np.arange(test.num_tokens), score_RG.argmax(axis=1)[test.request_T])
        wiring = Wiring.plain(8, ranks_per_node=4)
        meter = LocalityMeter(2, 8, wiring)
        meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, slots, 8, spec, wiring))
        return meter.columns()

    flat, nodes = (
        Semantic(restarts=4).place(problem(train, 8, slots, home=home, cluster=cluster(n, 8 // n))) for n in (1, 2)
    )
    assert sorted(map(tuple, flat.rank_mask_LEG[0].T)) == sorted(map(tuple, nodes.rank_mask_LEG[0].T))
    before, after = measured(flat), measured(nodes)
    assert after["nic_bytes"] < 0.95 * before["nic_bytes"]
    assert after["lar"] == pytest.approx(before["lar"], abs=0.02)
