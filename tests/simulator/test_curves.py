"""Curves: measured points are hit exactly, steps and floor are kept, what lies beyond is marked."""

from __future__ import annotations

import numpy as np
import pytest
from simulator_kit import presets

from semmoe.specs import Curve
from simulator.cost.curves import CurveSet, LatencyCurve

MIB = float(1 << 20)


def test_every_measured_point_of_every_preset_is_hit_exactly():
    checked = 0
    for cluster in presets().values():
        for curve in cluster.curves:
            np.testing.assert_allclose(LatencyCurve(curve).time_us(curve.bytes), curve.latency_us, rtol=1e-12)
            checked += 1
    assert checked == 7 * 12 + 8


def test_a_curve_is_monotone_wherever_its_points_are():
    curve = next(c for c in presets()["h100x8"].curves if c.op == "alltoall" and c.ranks == 8)
    start = next(i for i in range(len(curve.bytes)) if list(curve.latency_us[i:]) == sorted(curve.latency_us[i:]))
    sizes = np.geomspace(curve.bytes[start], 4 * curve.bytes[-1], 500)
    assert start < len(curve.bytes) - 10 and (np.diff(LatencyCurve(curve).time_us(sizes)) > 0).all()


def test_a_cost_that_is_floor_plus_bytes_over_bandwidth_is_found_between_two_of_its_points():
    """Points of 2/3 * (10 us + 5 us/MiB): the multiple is the same at both, hence in between."""
    curve = LatencyCurve(Curve(op="alltoall", ranks=4, bytes=(MIB, 4 * MIB), latency_us=(10, 20)))
    assert curve.time_us([2 * MIB, 3 * MIB]) == pytest.approx([2 / 3 * 20, 2 / 3 * 25])


def test_the_worked_example_of_the_module():
    curve = LatencyCurve(Curve(op="alltoall", ranks=4, bytes=(1e6, 4e6), latency_us=(10, 28)))
    assert curve.time_us(2e6) == pytest.approx(24 * np.sqrt(10 / 17 * 28 / 38))


def test_below_the_first_point_is_the_floor_and_above_the_last_its_bandwidth():
    curve = LatencyCurve(Curve(op="alltoall", ranks=4, bytes=(1000, 2000), latency_us=(10, 12)))
    assert curve.time_us([0, 1, 999]) == pytest.approx([10, 10, 10])
    assert curve.time_us(5000) == pytest.approx(12 + 3000 * 2 / 1000)


def test_a_protocol_step_stays_a_step():
    curve = LatencyCurve(Curve(op="alltoall", ranks=4, bytes=(1000, 1001, 4000), latency_us=(8, 14, 15)))
    assert curve.time_us(999) == pytest.approx(8) and curve.time_us(1002) > 13.9


def test_other_numbers_of_ranks_are_interpolated_inside_and_marked_outside():
    curves = CurveSet([Curve(op="alltoall", ranks=n, bytes=(1000,), latency_us=(us,)) for n, us in ((2, 4), (8, 16))])
    inside, beyond = curves.pick(["alltoall"], 4), curves.pick(["alltoall"], 16)
    assert inside and inside.time_us(1000) == pytest.approx(8) and not inside.marks
    assert beyond and beyond.marks == {"extrapolated"}
    same_egress = 1000 * (7 / 8) / (15 / 16)  # one point of 16 us says 16 us / 1000 bytes above it, 16 us below
    assert beyond.time_us(same_egress) == pytest.approx(16) and beyond.time_us(2000) == pytest.approx(32 * 15 / 14)


def test_the_most_specific_name_rules_and_an_unmeasured_operation_is_none():
    curves = CurveSet([Curve(op=op, ranks=4, bytes=(1,), latency_us=(us,)) for op, us in (("srs", 3), ("sum", 5))])
    first = curves.pick(["srs", "sum"], 4)
    assert first and first.time_us(1) == pytest.approx(3)
    assert curves.pick(["alltoall"], 4) is None
