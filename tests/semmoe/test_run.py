"""RunBuilder: what makes a configuration's id, what it shares, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.errors import UserError


def build(*overrides: str, builder: RunBuilder | None = None):
    (config,) = compose_all(["planned_folds=0", *overrides])
    return (builder or RunBuilder()).build(config)


@pytest.fixture(scope="module")
def builder() -> RunBuilder:
    return RunBuilder()


def test_config_id_names_the_configuration_and_not_the_backend_or_paths(builder):
    base = build(builder=builder)
    for same in (
        "name=other",
        "results_dir=elsewhere",
        "repeats=3",
        "transport=shared",
        "rerun=true",
        "home_cap=1.5",
        "token_scheduler=semantic",
        "serving.max_running=7",
        "measure.warmup=9",
    ):
        assert build(same, builder=builder).config_id == base.config_id, same
    ids = [base.config_id]
    for other in (
        "seed=1",
        "placement=strided",
        "request_scheduler=shortest_queue",
        "dispatcher=a2a_assignment",
        "dtype=bf16",
        "workload.batch_tokens=64",
        "workload=serve",
        "train_fraction=0.4",
        "ep_size=2",
    ):
        ids.append(build(other, builder=builder).config_id)
    assert len(set(ids)) == len(ids)


def test_token_scheduler_and_cap_count_where_tokens_are_shuffled(builder):
    ids = {
        build("flow=tp_shuffled", change, builder=builder).config_id
        for change in ("seed=0", "home_cap=1.5", "token_scheduler=semantic")
    }
    assert len(ids) == 3


def test_batches_and_planner_agree_with_the_flow(builder):
    run = build("workload.max_batches=2", builder=builder)
    steps = list(run.batch_steps())
    assert [len(rows) for rows, _ in steps] == [512, 512]
    for rows, homes in steps:
        assert np.array_equal(homes, run.request_rank_R[run.heldout.request_T[rows]])
    shuffled = build("flow=tp_shuffled", "workload.max_batches=1", builder=builder)
    assert next(shuffled.batch_steps())[1] is None and shuffled.request_rank_R is None


def test_a_run_travels_to_rank_processes_and_plans_the_same_there(builder):
    run = build(
        "flow=tp_shuffled", "token_scheduler=semantic", "placement=semantic", "workload.max_batches=1", builder=builder
    )
    back = pickle.loads(pickle.dumps(run))
    rows, _ = next(run.batch_steps())
    assert back.config_id == run.config_id
    assert np.array_equal(back.planner().route(rows, None).homes_TL, run.planner().route(rows, None).homes_TL)


@pytest.mark.parametrize(
    ("overrides", "planned_by", "keeps_order"),
    [
        (["flow=tp_shuffled"], ("no_shuffle", "token_table"), True),
        (["flow=tp_shuffled", "predictor=paper", "token_scheduler=sort_cut"], ("sort_cut", "paper"), False),
        (["flow=tp_shuffled", "token_scheduler=oracle"], ("oracle_tokens",), False),
        (["flow=tp_shuffled", "predictor=none"], ("no_shuffle",), True),
        (["flow=tp_scattered"], (), False),
        (["flow=dp"], (), False),
    ],
)
def test_a_run_says_who_plans_its_layers_and_whether_tokens_keep_their_order(
    builder, overrides, planned_by, keeps_order
):
    run = build(*overrides, builder=builder)
    assert (run.planned_by, run.spec.keeps_order) == (planned_by, keeps_order)


def test_serving_loop_has_a_queue_a_rank_in_dp_and_one_in_tp(builder):
    assert len(build("workload=serve", builder=builder).serving_loop().queues) == 4
    assert len(build("workload=serve", "flow=tp_shuffled", builder=builder).serving_loop().queues) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=mixtral-8x7b"], r"recorded on tiny \(32 experts.*model=mixtral-8x7b has 8 experts"),
        (["ep_size=3"], r"32 experts in 32 slots cannot be split over ep_size=3.*placement\.slots=33"),
        (["ep_size=64"], "only 4 ranks"),
        (["dispatcher=none"], "needs a dispatcher"),
        (["flow=tp_replicated"], "set dispatcher=none"),
        (["flow=tp_shuffled", "dispatcher=allgather_rs"], "dp only"),
        (["scope=everything"], "moe_layers, full_model"),
        (["placement._target_=nowhere.Policy"], r"placement\._target_=nowhere\.Policy"),
        (["placement._target_=semmoe.placement.contiguous.Nope"], "Nope"),
        (["+placement.depth=3"], r"takes no arguments.*given here: depth"),
        (["trace=file", "trace.path=absent.npz"], r"absent\.npz: no such trace file"),
        (["dtype=int3"], "dtype=int3 must be one of fp32"),
        (["train_fraction=1.5"], "train_fraction"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(overrides, message, builder):
    with pytest.raises(UserError, match=message):
        build(*overrides, builder=builder)


def test_a_calibration_file_replaces_the_guess_and_a_broken_one_is_named(tmp_path):
    good = tmp_path / "good.yaml"
    good.write_text(
        "{name: local, nodes: 1, ranks_per_node: 8, topology: shared_memory, memory_gib: 4, memory_gbps: 9, "
        "bf16_tflops: 0.1, link_gbps: 1, alpha_us: 1}"
    )
    assert build(f"cluster.file={good}").cluster.ranks == 8
    bad = tmp_path / "bad.yaml"
    for content, message in (
        ("[1, 2", "not a readable cluster file"),
        ("3", "not a readable cluster file"),
        ("{name: x, speed: 3}", "unknown key 'speed'"),
        ("{name: x}", "lacks nodes"),
    ):
        bad.write_text(content)
        with pytest.raises(UserError, match=message):
            build(f"cluster.file={bad}")
