"""A real calibration on two ranks gives a readable cluster file that the simulator prices with."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omegaconf import OmegaConf  # noqa: E402

from harness.app import calibrate  # noqa: E402
from harness.calibration.attention import attention_steps  # noqa: E402
from harness.calibration.collect import Effort  # noqa: E402
from harness.calibration.fit import (  # noqa: E402
    BLOCK_WORK,
    attention_terms,
    block_term,
)
from semmoe.inputs import load_cluster  # noqa: E402
from semmoe.specs import ClusterSpec  # noqa: E402
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
