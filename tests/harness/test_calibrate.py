"""Calibration: fits recover known costs, patterns are what they say, and a real one gives a readable cluster file."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omegaconf import OmegaConf  # noqa: E402

from harness.app import calibrate  # noqa: E402
from harness.calibration.attention import attention_steps  # noqa: E402
from harness.calibration.collect import Effort, expert_grid_points  # noqa: E402
from harness.calibration.collectives import BURNT_SPAN, Case, Work, exchange_sizes, home_sizes  # noqa: E402
from harness.calibration.fit import (  # noqa: E402
    BLOCK_WORK,
    Samples,
    attention_terms,
    block_term,
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
from harness.calibration.rotation import burnt_memory  # noqa: E402
from harness.calibration.skew import FITTED, fit_skew, held_out_errors, loads, skewed_cases  # noqa: E402
from semmoe.dispatch import DispatchSpec  # noqa: E402
from semmoe.inputs import load_cluster  # noqa: E402
from semmoe.specs import ClusterSpec  # noqa: E402
from semmoe.traffic import count_traffic  # noqa: E402
from simulator.cost.attention import AttentionLoad  # noqa: E402
from simulator.cost.block_pass import BlockPass  # noqa: E402
from simulator.cost.whole_pass import WholePass  # noqa: E402
from tests.harness.measure_kit import build  # noqa: E402

SMALL = Effort(
    home_rows=(4, 64),
    sent_rows=(6, 60, 90),
    places=(8, 64),
    rows_per_expert=(1, 16),
    local_tokens=(8, 384),
    planned_tokens=(32, 128),
    pools=2,
    samples=1,
    inner=3,
    local_samples=2,
    entries=(1, 8),
)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(content of the cluster file, raw samples, the run) of one small calibration on two ranks."""
    path = tmp_path_factory.mktemp("calibration") / "local.yaml"
    run = build("cluster.file=null")
    effort = Effort(**{**SMALL.__dict__, "home_rows": (4, 32, 64)})
    assert calibrate(run, path, effort) == path
    return OmegaConf.to_container(OmegaConf.load(path)), json.loads(path.with_suffix(".samples.json").read_text()), path


def test_calibration_writes_a_cluster_file_that_runs_can_use(calibrated):
    content, raw, path = calibrated
    spec = ClusterSpec.from_dict(content)
    names = {curve.op for curve in spec.curves}
    dispatched = {
        f"{op}.{d}" for op in ("dispatch", "combine") for d in ("a2a_dedup", "a2a_assignment", "allgather_rs")
    }
    assert names >= dispatched | {"dispatch.low_latency", "srs", "sag", "reduce_scatter", "all_gather", "all_reduce"}
    assert all(curve.ranks == 2 for curve in spec.curves)
    assert set(spec.per_row_ns) >= {"gate", "permute.a2a_dedup", "permute.tp_replicated", "plan.tp_shuffled"}
    schedulers = {"no_shuffle", "semantic", "sort_cut", "confident_first", "priced", "rehome", "oracle_tokens"}
    predictors = {"token_table", "device_ngram", "paper", "fusion", "oracle"}
    assert set(spec.host_us) >= {f"plan.{name}" for name in schedulers | predictors}
    by_work = {block_term(name, work) for name in raw_names(raw) for work in BLOCK_WORK}
    by_work |= {*attention_terms("attention"), *attention_terms("attention.tp2")}
    assert spec.host_us.keys() | by_work >= spec.per_row_ns.keys()
    assert spec.expert_grid_shape == (128, 32)
    active, rows = {a for _, a, _ in spec.expert_grid}, {r / a for r, a, _ in spec.expert_grid}
    assert len(spec.expert_grid) == len(active) * len(rows), "every pair of the grid"
    assert spec.provenance["all"].startswith("measured") and spec.cores >= 1 and spec.topology == "shared_memory"
    assert load_cluster({"file": str(path)})[1].digest == spec.digest
    assert raw["environment"]["ranks"] == 2 and {"load_1min", "spread", "warning"} <= raw["environment"].keys()
    assert all(us > 0 for *_, us in raw["collectives_us"])
    assert all(np.shape(us_GS) == (2, SMALL.pools * SMALL.local_samples) for _, us_GS in raw["local_us"]), (
        "every sample of every rank"
    )
    assert {"srs.port", "sag.port"} <= spec.skew.keys() and spec.host_us["start"] >= 0
    told = {line["operation"]: line for line in raw["residuals"]}
    assert {"srs", "srs, pools", "dispatch", "gate", "attention", "srs, skewed", "experts, all at once"} <= told.keys()
    assert all(line["points"] >= 1 and 0 <= line["median"] <= line["p90"] for line in told.values())


def test_calibrated_times_grow_with_the_work(calibrated):
    content, _, _ = calibrated
    for curve in content["curves"]:
        assert all(a <= b for a, b in zip(curve["latency_us"], curve["latency_us"][1:], strict=False))
    grid = {(rows, active): us for rows, active, us in content["expert_grid"]}
    assert grid[16 * 16, 16] > grid[16, 16] > grid[1, 1]
    assert content["per_row_ns"]["permute.a2a_dedup"] > 0


def test_a_full_model_is_calibrated_by_its_single_operations(calibrated):
    content, raw, _ = calibrated
    fixed_us, by_ns = content["host_us"], content["per_row_ns"]
    assert {"head", "step"} <= fixed_us.keys() & by_ns.keys()
    spec, model = ClusterSpec.from_dict(content), build().model
    for ranks, name in ((1, "attention"), (2, "attention.tp2")):
        fixed, *by_work = attention_terms(name)
        assert fixed in fixed_us and set(by_work) <= by_ns.keys()
        points = np.array([point for told, *point in raw["attention_us"] if told == name])
        assert len(points) == len(list(attention_steps())) and (points[:, 4] > 0).all()
        whole = WholePass.of(spec, model, attention_tp=ranks)
        assert whole is not None and whole.mark == "measured"
        predicted_us = whole.time_us(AttentionLoad(*points[:, :4].T))
        assert np.median(np.abs(predicted_us / points[:, 4] - 1)) < 0.5, "the simulator reads what was fitted"
        one, eight = (whole.around_us(AttentionLoad(*np.full((4, 1), float(n)))) for n in (1, 8))
        assert eight > one > 0
    assert WholePass.of(spec, model, attention_tp=4) is None, "not measured with 4 ranks"
    assert WholePass.of(spec, model.scaled(0.5), attention_tp=1) is None, "another model's terms"


def raw_names(raw):
    return {name for name, *_ in raw["blocks_us"]}


def test_blocks_of_any_model_are_calibrated_with_all_heads_and_with_a_share(calibrated):
    content, raw, _ = calibrated
    spec, model = ClusterSpec.from_dict(content), build().model
    assert raw_names(raw) == {"blocks.attention.tiny", "blocks.attention.tiny.tp2"}
    for flow, name in (("dp", "blocks.attention.tiny"), ("tp_shuffled", "blocks.attention.tiny.tp2")):
        points = np.array([point for told, *point in raw["blocks_us"] if told == name])
        known = BlockPass.of(spec, model, flow, 2)
        assert known is not None
        predicted_us = known.time_us(AttentionLoad(*points[:, :4].T))
        assert np.median(np.abs(predicted_us / points[:, 4] - 1)) < 0.5, "the simulator reads what was fitted"
        assert known.head_us(np.array([0, 8]))[1] > known.head_us(np.array([0, 8]))[0] == 0
        assert known.dense_us([8.0]) == known.shared_us([8.0]) == 0, "the tiny model has none"
    assert BlockPass.of(spec, model, "tp_scattered", 4) is None, "not measured with 4 ranks"
    assert BlockPass.of(spec, model.scaled(0.5), "dp", 2) is None, "another model's terms"


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
    one, other = (Work(400.0, burnt_memory(1 << 12), ranks_per_core=1) for _ in range(2))
    drawn = [one.rng.uniform(*BURNT_SPAN) for _ in range(50)]
    assert drawn == [other.rng.uniform(*BURNT_SPAN) for _ in range(50)]
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.15) and np.ptp(drawn) > 1
    assert Work(300.0, burnt_memory(1 << 12), ranks_per_core=3).do() >= 3 * 300.0 * BURNT_SPAN[0]


def test_isotonic_worked_example():
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]


def test_expert_grid_covers_one_to_all_slots():
    assert expert_grid_points(8, (1, 4)) == [(a, r) for a in (1, 2, 4, 8) for r in (1, 4)]
    assert {a for a, _ in expert_grid_points(10, (1,))} == {1, 2, 4, 8, 10}
    assert expert_grid_points(1, (1,)) == [(1, 1)]
