"""Calibration: fits recover known costs, patterns are what they say, and a real one gives a readable cluster file."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omegaconf import OmegaConf  # noqa: E402

from harness.app import calibrate  # noqa: E402
from harness.calibrate import Effort, expert_grid_points  # noqa: E402
from harness.fit import (  # noqa: E402
    ATTENTION_TERMS,
    Samples,
    curves_of,
    fit_attention,
    fit_local,
    isotonic,
    residuals,
    size_bytes,
)
from harness.single_attention import attention_steps  # noqa: E402
from harness.single_ops import exchange_sizes, home_sizes  # noqa: E402
from semmoe.dispatch import DispatchSpec  # noqa: E402
from semmoe.errors import UserError  # noqa: E402
from semmoe.inputs import load_cluster  # noqa: E402
from semmoe.specs import ClusterSpec  # noqa: E402
from semmoe.traffic import count_traffic  # noqa: E402
from simulator.cost.attention import AttentionLoad  # noqa: E402
from simulator.cost.whole_pass import WholePass  # noqa: E402
from tests.harness.measure_kit import build  # noqa: E402

SMALL = Effort(
    home_rows=(4, 64),
    sent_rows=(6, 60, 90),
    places=(8, 64),
    rows_per_expert=(1, 16),
    local_tokens=(8, 384),
    planned_tokens=(32, 128),
    samples=3,
    inner=2,
    local_samples=6,
    entries=(1, 8),
)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(content of the cluster file, raw samples, the run) of one small calibration on two ranks."""
    path = tmp_path_factory.mktemp("calibration") / "local.yaml"
    run = build(f"cluster.file={path}")
    effort = Effort(**{**SMALL.__dict__, "home_rows": (4, 32, 64)})
    assert calibrate(run, effort) == path
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
    assert spec.host_us.keys() | set(ATTENTION_TERMS) >= spec.per_row_ns.keys()
    assert spec.expert_grid_shape == (128, 32)
    active, rows = {a for _, a, _ in spec.expert_grid}, {r / a for r, a, _ in spec.expert_grid}
    assert len(spec.expert_grid) == len(active) * len(rows), "every pair of the grid"
    assert spec.provenance["all"].startswith("measured") and spec.cores >= 1 and spec.topology == "shared_memory"
    assert load_cluster({"file": str(path)})[1].digest == spec.digest
    assert raw["environment"]["ranks"] == 2
    assert all(us > 0 for *_, us in raw["collectives_us"])


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
    assert {"attention.block", "head", "step"} <= fixed_us.keys()
    assert {*ATTENTION_TERMS, "head", "step"} <= by_ns.keys()
    assert len(raw["attention_us"]) == len(list(attention_steps())) and all(us > 0 for *_, us in raw["attention_us"])
    spec, model = ClusterSpec.from_dict(content), build().model
    whole = WholePass.of(spec, model, attention_tp=1)
    assert whole is not None and whole.mark == "measured"
    work = np.array([work for work, _ in attention_steps()], dtype=np.float64).T
    load = AttentionLoad(work[0], work[1], work[2], work[3])
    measured_us = np.array([us for *_, us in raw["attention_us"]])
    assert np.median(np.abs(whole.time_us(load) / measured_us - 1)) < 0.5, "the simulator reads what was fitted"
    assert WholePass.of(spec, model, attention_tp=2) is None
    assert WholePass.of(spec, model.scaled(0.5), attention_tp=1) is None, "another model's terms"


def test_attention_fit_recovers_known_costs():
    work = [work for work, _ in attention_steps()]
    cost_us = np.array([120.0, 3.0, 40.0, 0.02, 0.05])
    samples = Samples(attention={w: float(cost_us @ (1, *w)) for w in work})
    host_us, per_row_ns = fit_attention(samples)
    assert [host_us["attention.block"], *(per_row_ns[t] / 1e3 for t in ATTENTION_TERMS)] == pytest.approx(cost_us)
    assert fit_attention(Samples()) == ({}, {})


def test_no_file_to_write_is_refused():
    with pytest.raises(UserError, match="cluster=local"):
        calibrate(build("cluster=h100x8", "ep_size=2"))


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
    samples.experts = {(1, 8): (10.0, 30.0, 8.0)}
    host_us, per_row_ns = fit_local(samples)
    report = {
        what: figure
        for what, figure, _ in residuals(samples, {"host_us": host_us, "per_row_ns": per_row_ns, "cores": 2}, 4)
    }
    assert report["permute.a2a_dedup, linear fit"] == pytest.approx(0, abs=1e-9)
    assert report["gate, linear fit"] > 0.2
    assert report["experts, all ranks at once"] == pytest.approx(30 / 20)
    assert report["experts, CPU time beside others"] == pytest.approx(10 / 8)


def test_one_disturbed_sample_does_not_move_a_curve_and_noise_does_not_make_it_fall():
    samples = Samples(
        collectives={
            ("srs", 4, 0.0, 2): [100.0] * 9 + [5000.0],
            ("srs", 32, 0.0, 2): [90.0] * 10,
            ("srs", 64, 0.0, 2): [200.0] * 10,
            ("srs", 64, 0.5, 2): [900.0] * 10,
        }
    )
    (curve,) = curves_of(samples, 2, build())
    assert curve["latency_us"] == [95.0, 95.0, 200.0]


def test_isotonic_worked_example():
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]


def test_expert_grid_covers_one_to_all_slots():
    assert expert_grid_points(8, (1, 4)) == [(a, r) for a in (1, 2, 4, 8) for r in (1, 4)]
    assert {a for a, _ in expert_grid_points(10, (1,))} == {1, 2, 4, 8, 10}
    assert expert_grid_points(1, (1,)) == [(1, 1)]
