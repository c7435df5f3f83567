"""Fits of a calibration recover known costs, patterns of traffic are what they say, samples are judged as they should."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from harness.calibration.attention import attention_steps  # noqa: E402
from harness.calibration.collect import expert_grid_points  # noqa: E402
from harness.calibration.collectives import BURNT_SPAN, Case, Work, exchange_sizes, home_sizes  # noqa: E402
from harness.calibration.fit import (  # noqa: E402
    Samples,
    attention_terms,
    curves_of,
    fit_attention,
    fit_local,
    isotonic,
    size_bytes,
    smoothed,
    start_us,
)
from harness.calibration.planning import planning_terms  # noqa: E402
from harness.calibration.residuals import busy_warning, residuals, spread, table  # noqa: E402
from harness.calibration.skew import FITTED, fit_skew, held_out_errors, loads, skewed_cases  # noqa: E402
from semmoe.dispatch import DispatchSpec  # noqa: E402
from semmoe.traffic import count_traffic  # noqa: E402
from tests.harness.measure_kit import build  # noqa: E402


def test_attention_fit_recovers_known_costs():
    work = [work for work, _ in attention_steps()]
    cost_us = np.array([120.0, 3.0, 40.0, 0.02, 0.05])
    whole = {w: float(cost_us @ (1, *w)) for w in work}
    samples = Samples(attention={"attention": whole, "attention.tp4": {w: us / 4 for w, us in whole.items()}})
    host_us, per_row_ns = fit_attention(samples)
    for name, share in (("attention", 1), ("attention.tp4", 4)):
        fixed, *by_work = attention_terms(name)
        assert [host_us[fixed], *(per_row_ns[t] / 1e3 for t in by_work)] == pytest.approx(cost_us / share)
    assert fit_attention(Samples()) == ({}, {})


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("skew", [0.0, 0.5])
def test_synthetic_exchanges_match_and_have_the_asked_for_skew(ranks, skew):
    sent, received = (
        np.array(x) for x in zip(*(exchange_sizes(r, ranks, 40, skew) for r in range(ranks)), strict=True)
    )
    np.testing.assert_array_equal(sent, received.T)
    assert (sent.sum(axis=1) == 40).all() and (np.diag(sent) == 0).all()
    if skew and ranks > 2:
        assert (sent[1:, 0] >= 20).all() and sent.sum(axis=0)[0] > 1.4 * sent.sum(axis=0)[1:].max()
    else:
        assert sent[~np.eye(ranks, dtype=bool)].min() >= 40 // (ranks - 1) and sent.max() <= -(-40 // (ranks - 1))
    homes = home_sizes(ranks, 40, skew)
    assert sum(homes) == 40 * ranks and (homes[0] > homes[1]) == bool(skew)


def test_sizes_of_curves_are_those_that_traffic_of_the_same_rows_has():
    """The bytes that leave a rank, times n / (n - 1), with what Traffic counts for the same operation."""
    run, ranks, n = build(), 4, 8
    rng = np.random.default_rng(0)
    homes_TL = np.repeat(np.arange(ranks), n)[:, None]
    slots_TLk = rng.integers(0, 32, (ranks * n, 1, 4))
    spec = DispatchSpec(flow="tp_shuffled", dispatcher="a2a_dedup", hidden=128, top_k=4, activation_dtype="fp32")
    by_op = {c.op: c for c in count_traffic(slots_TLk, homes_TL, 32, ranks, spec).collectives}
    for op in ("srs", "sag"):
        leaving = by_op[op].remote_rows_LGG()[0].sum(axis=1).max() * by_op[op].row_bytes
        assert size_bytes(op, n, ranks, run) == pytest.approx(leaving * ranks / (ranks - 1))
    gathered = DispatchSpec(flow="dp", dispatcher="allgather_rs", hidden=128, top_k=4, activation_dtype="fp32")
    traffic = count_traffic(slots_TLk, homes_TL, 32, ranks, gathered)
    out = (traffic.collectives[0].remote_bytes_L(ranks)[0] + traffic.metadata_bytes) / ranks
    assert size_bytes("gather_rows", n, ranks, run) == pytest.approx(out * ranks / (ranks - 1))
    assert size_bytes("reduce_rows", n, ranks, run) == pytest.approx(n * ranks * 512)
    assert size_bytes("combine", 30, ranks, run) == pytest.approx(30 * 512 * 4 / 3)


def test_fit_recovers_known_costs_and_reports_what_it_cannot_describe():
    samples = Samples(local={("gate", n): (float(n), 40 + 0.5 * n) for n in (8, 64, 512)})
    samples.local |= {("permute.a2a_dedup", n): (2.0 * n, 700 + 0.2 * 2 * n) for n in (8, 64, 512)}
    host_us, per_row_ns = fit_local(samples)
    assert host_us == pytest.approx({"gate": 40, "permute.a2a_dedup": 700})
    assert per_row_ns == pytest.approx({"gate": 500, "permute.a2a_dedup": 200})
    samples.local["gate", 64] = (64.0, 144.0)  # twice what the line says
    samples.experts = {(1, 8): (10.0, 40.0)}
    host_us, per_row_ns = fit_local(samples)
    lines = residuals(samples, {"host_us": host_us, "per_row_ns": per_row_ns, "cores": 2}, 4)
    told = {line.operation: line for line in lines}
    assert told["permute.a2a_dedup"].p90 == pytest.approx(0, abs=1e-6)
    assert told["gate"].p90 > 20 and told["gate"].points == 3
    assert told["experts, all at once"].median == pytest.approx(50), "10 us on 2 ranks a core against 40"
    assert all(line.unit.startswith("%") and line.operation in table(lines) for line in lines)


def test_planning_is_told_apart_by_scheduler_and_predictor():
    """Per layer, of 4: each scheduler with the shuffle plan that follows it, each look-up alone."""
    points = {("homes.semantic", 64): (64.0, 800.0), ("homes.no_shuffle", 64): (64.0, 80.0)}
    points |= {("scores.token_table", 64): (64.0, 40.0), ("plan.tp_scattered", 64): (64.0, 50.0)}
    assert planning_terms(points, layers=4) == {
        ("plan.semantic", 64): (64.0, 250.0),
        ("plan.no_shuffle", 64): (64.0, 70.0),
        ("plan.token_table", 64): (64.0, 10.0),
        ("plan.tp_scattered", 64): (64.0, 50.0),
        ("plan.tp_shuffled", 64): (64.0, 260.0),
    }


def test_skew_fit_recovers_known_weights_and_is_checked_at_skews_it_has_not_seen():
    ranks, sent, homes = 4, (6, 60, 240, 960), (4, 32, 128, 512)
    cases = [Case("dispatch", n) for n in sent] + [Case("srs", n) for n in homes] + skewed_cases(sent, homes, ranks)
    cases = [case for case in cases if case.op in ("dispatch", "srs")]

    def law_us(case, a, b):
        mean, port, pair = loads(case, ranks)
        return 300 + 5 * (mean + a * (port - mean) + b * max((ranks - 1) * pair - port, 0))

    us = {case: law_us(case, *((0.5, 0.2) if case.op == "dispatch" else (0.8, 0.0))) for case in cases}
    weights = fit_skew(us, ranks)
    assert weights == pytest.approx(
        {"dispatch.port": 0.5, "dispatch.pair": 0.2, "srs.port": 0.8, "srs.pair": 0.0}, abs=1e-3
    )
    assert all(errors.max() < 1e-3 for errors in held_out_errors(us, ranks, weights).values())
    unseen = {case: (t if case.skew in (0.0, *FITTED) else 2 * t) for case, t in us.items()}
    assert fit_skew(unseen, ranks) == pytest.approx(weights), "held-out skews have no say in the fit"
    assert held_out_errors(unseen, ranks, weights)["dispatch"].min() == pytest.approx(0.5, abs=1e-3)


def test_start_is_what_two_calls_after_a_barrier_take_beyond_two_of_many():
    key = (Case("srs", 4), 4)
    samples = Samples(collectives={key: [100.0] * 4}, opening={key: [250.0] * 4})
    assert start_us(samples, 4) == pytest.approx(50) and start_us(Samples(), 4) == 0
    samples.opening[key] = [180.0] * 4
    assert start_us(samples, 4) == 0, "noise makes no negative cost"


def test_a_busy_machine_is_told_what_to_do():
    assert busy_warning(0.2, 2, 0.1) is None
    assert "load average 3.0 on 2 cores" in busy_warning(3.0, 2, 0.1)
    loud = Samples(raw={("gate", 4): [[100.0, 300.0, 100.0, 300.0]]})
    assert "End other work" in busy_warning(0.0, 2, spread(loud))
    steady_ones = Samples(raw={("gate", 4): [[100.0, 101.0, 100.0]]})
    assert busy_warning(0.0, 2, spread(steady_ones)) is None


def test_one_disturbed_sample_does_not_move_a_curve_and_noise_does_not_make_it_fall():
    samples = Samples(
        collectives={
            (Case("srs", 4), 2): [100.0] * 9 + [5000.0],
            (Case("srs", 32), 2): [90.0] * 10,
            (Case("srs", 64), 2): [200.0] * 10,
            (Case("srs", 64, 0.5), 2): [900.0] * 10,
        }
    )
    (curve,) = curves_of(samples, 2, build())
    assert curve["latency_us"] == [95.0, 95.0, 200.0]


def test_a_curve_is_a_line_where_noise_hides_it_and_follows_its_points_where_not():
    sizes, rng = np.array([1.0, 10.0, 40.0, 160.0]), np.random.default_rng(0)
    line = 1000 + 5 * sizes
    noisy = [us * rng.normal(1.0, 0.3, 12) for us in line]
    assert np.abs(smoothed(sizes, noisy) / line - 1).max() < 0.2, "noise of a mean is 9 %"
    assert np.ptp(np.diff(smoothed(sizes, noisy)) / np.diff(sizes)) < 1e-6
    bent = np.array([1000.0, 1000.0, 2000.0, 9000.0])
    assert np.allclose(smoothed(sizes, [us * rng.normal(1.0, 0.01, 12) for us in bent]), bent, rtol=0.02)


def test_pools_of_ranks_that_differ_are_told():
    us = [100.0, 100.0, 150.0, 150.0]
    samples = Samples(
        collectives={(Case("barrier", 0), 2): us, (Case("srs", 4), 2): us}, experts={(1, 1): (50.0, 50.0)}, pools=2
    )
    lines = residuals(samples, {"host_us": {}, "per_row_ns": {}, "cores": 2}, 2)
    told = {line.operation: line for line in lines}
    assert told["srs, pools"].median == pytest.approx(40.0) and told["srs"].median == 0.0


def test_work_between_calls_is_of_no_fixed_length_and_the_same_on_all_ranks():
    one, other = (Work(400.0, 1 << 12, ranks_per_core=1) for _ in range(2))
    drawn = [one.rng.uniform(*BURNT_SPAN) for _ in range(50)]
    assert drawn == [other.rng.uniform(*BURNT_SPAN) for _ in range(50)]
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.15) and np.ptp(drawn) > 1
    assert Work(300.0, 1 << 12, ranks_per_core=3).do() >= 3 * 300.0 * BURNT_SPAN[0]


def test_isotonic_worked_example():
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]


def test_expert_grid_covers_one_to_all_slots():
    assert expert_grid_points(8, (1, 4)) == [(a, r) for a in (1, 2, 4, 8) for r in (1, 4)]
    assert {a for a, _ in expert_grid_points(10, (1,))} == {1, 2, 4, 8, 10}
    assert expert_grid_points(1, (1,)) == [(1, 1)]
