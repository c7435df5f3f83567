"""Requests re-homed after their head: their KV cache is charged in bytes and time, and nothing is where nothing moves."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_kit import cluster

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.plugins import instantiate
from semmoe.results import check_row
from semmoe.run import Run
from simulator.app import simulate
from simulator.kv_move import price_moves

BASE = ("planned_folds=0", "cluster.file=null", "workload.max_batches=2", "placement=contiguous")


@pytest.fixture(scope="module")
def builder() -> RunBuilder:
    return RunBuilder()


def build(builder: RunBuilder, *overrides: str) -> Run:
    (config,) = compose_all([*BASE, *overrides])
    return builder.build(config)


def test_moves_by_hand() -> None:
    (config,) = compose_all(["model=qwen3-30b-a3b"])
    model = instantiate(config["model"], "model")
    moves = np.array([[0, 1, 64], [0, 3, 64]])  # within a node of two, and to the other node
    bytes_M, ms_M = price_moves(moves, model, cluster(4, nodes=2))
    assert bytes_M.tolist() == [64 * 98304] * 2
    assert ms_M == pytest.approx([(10 + 6291.456) / 1e3, (20 + 12582.912) / 1e3])  # 1 GB/s inside, 0.5 GB/s across


def test_a_request_runs_its_head_where_it_came_and_the_rest_where_its_experts_are(builder: RunBuilder) -> None:
    run = build(builder, "request_scheduler=windowed", "workload.head_tokens=16")
    trace, home_T = run.heldout, run.home_T
    assert home_T is not None and run.request_rank_R is not None
    first = trace.request_offset_R1[:-1]
    assert (home_T[first] == np.arange(trace.num_requests) % run.ep_size).all()
    last = trace.request_offset_R1[1:] - 1
    longer = trace.length_R > 16
    assert longer.any() and (home_T[last][longer] == run.request_rank_R[longer]).all()
    source, target, tokens = run.kv_moves_M3.T
    assert (source != target).all() and (tokens == 16).all()
    row = check_row(simulate(run))
    assert row["kv_moved_bytes"] == len(tokens) * 16 * run.model.kv_bytes_per_token > 0
    assert row["kv_move_ms"] > 0


def test_nothing_moves_nothing_is_charged(builder: RunBuilder) -> None:
    plain = build(builder, "request_scheduler=windowed")
    stays = build(builder, "request_scheduler=round_robin", "workload.head_tokens=16")
    for run in (plain, stays):
        row = simulate(run)
        assert row["kv_moved_bytes"] == row["kv_move_ms"] == 0.0
    assert stays.config_id != build(builder, "request_scheduler=round_robin").config_id
    tp = [build(builder, "flow=tp_scattered", f"workload.head_tokens={n}") for n in (0, 16)]
    assert tp[0].config_id == tp[1].config_id and "kv_moved_bytes" not in simulate(tp[1])
