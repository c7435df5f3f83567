"""Expert time: the closed form by hand, its fit, the calibrated grid, and ranks that share cores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulator_kit import cluster, presets, spec, toy_model

from semmoe.errors import UserError
from simulator.cost.experts import ExpertGrid, ExpertLaw, fit_expert_law
from simulator.cost.host import slowest
from simulator.cost.model import CostModel

LAW = ExpertLaw(
    memory_gbps=1000, tflops=100, memory_efficiency=0.5, max_mfu=0.5, half_rows=10, floor_us=7
)  # 500 bytes a ns, 50 TFLOPS


def test_closed_form_by_hand():
    one_expert = {"hidden": 1000, "ffn": 500, "expert_bytes": 3_000_000.0}
    assert LAW.time_us(1, 1, **one_expert) == pytest.approx(7 + 3e6 / 500e3), "few rows: memory rules"
    flops_us = 6 * 1000 * 500 / 50e6
    assert LAW.time_us(1000, 2, **one_expert) == pytest.approx(7 + (1000 + 2 * 10) * flops_us), "many: compute rules"
    assert LAW.time_us(0, 0, **one_expert) == 0, "no rows, no kernel"


def test_decode_time_follows_active_experts_and_prefill_time_rows():
    shape = {"hidden": 2048, "ffn": 768, "expert_bytes": 6.0 * 2048 * 768}
    decode = LAW.time_us([16, 16, 128], [8, 16, 16], **shape)
    assert decode[1] > 1.5 * decode[0] and decode[2] == pytest.approx(decode[1], rel=0.01)
    assert LAW.time_us(20000, 16, **shape) == pytest.approx(2 * LAW.time_us(10000, 16, **shape), rel=0.05)


def test_fit_recovers_a_law_from_its_own_points():
    shape = (2048, 768)
    law = replace(LAW, memory_efficiency=0.8, floor_us=30.0)
    points = [
        (8.0 * t, min(8.0 * t, 128), float(law.time_us(8 * t, min(8 * t, 128), *shape, 6.0 * 2048 * 768)))
        for t in (1, 4, 16, 64, 256, 1024, 4096, 16384)
    ]
    fitted = fit_expert_law(points, *shape, memory_gbps=1000, tflops=100)
    for rows, active, us in points:
        assert fitted.time_us(rows, active, *shape, 6.0 * 2048 * 768) == pytest.approx(us, rel=0.02)


def test_published_points_of_the_h100_kernel_are_met_within_the_stated_error():
    made = presets()["h100x8"]
    law = ExpertLaw(
        made.memory_gbps,
        made.bf16_tflops,
        made.memory_efficiency,
        made.max_mfu,
        made.mfu_half_rows,
        made.expert_floor_us,
    )
    for tokens, us in ((1, 49), (16, 420), (128, 450), (1024, 529), (4096, 836), (16384, 2912)):
        predicted = law.time_us(8 * tokens, min(8 * tokens, 128), 2048, 768, 6.0 * 2048 * 768)
        assert predicted == pytest.approx(us, rel=0.13), tokens


def test_grid_hits_its_points_and_grows_beyond():
    points = tuple((a * r, a, 10.0 * a + r) for a in (1, 4, 8) for r in (1, 16))
    grid = ExpertGrid(points, "local")
    for rows, active, us in points:
        assert grid.time_us(rows, active) == pytest.approx(us)
    assert grid.time_us(8 * 32, 8) == pytest.approx(2 * (80 + 16))
    assert grid.time_us(0, 0) == 0
    assert 11 < grid.time_us(2 * 4, 2) < 56


def test_a_grid_with_a_hole_is_refused():
    with pytest.raises(UserError, match=r"cluster local: expert_grid must hold.*\[1\.0, 2\.0\].*\[1\.0, 4\.0\]"):
        ExpertGrid(((1, 1, 5.0), (4, 1, 6.0), (2, 2, 9.0)), "local")


def test_a_grid_of_another_shape_gives_way_to_the_closed_form():
    grid = {"expert_grid": ((1, 1, 1e6),), "expert_grid_shape": (77, 77)}
    costs = [CostModel(toy_model(), cluster(**changes), spec(), 4) for changes in ({}, grid)]
    rows = np.full((1, 4), 6)
    assert costs[0].experts(rows, rows) == costs[1].experts(rows, rows)
    fitting = CostModel(toy_model(), cluster(**(grid | {"expert_grid_shape": (500, 100)})), spec(), 4)
    assert fitting.experts(rows[:, :1], rows[:, :1]) > 1e3 and "interpolated" in fitting.provenance()


def test_oversubscribed_ranks_wait_for_the_sum_over_cores():
    times = np.array([[8.0, 2.0, 2.0, 2.0]])
    assert slowest(times, cores=0) == 8 and slowest(times, cores=4) == 8
    assert slowest(times, cores=1) == 14
    assert slowest(np.full((1, 4), 8.0), cores=2) == 16
