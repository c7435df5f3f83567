"""Ranks that plan for themselves (measure.plan=device) give every token the home that the host gives it, in every layer."""

from __future__ import annotations

import plan_cases
import pytest
from kernel_cases import on_rank_zero
from plan_cases import process_steps, virtual_steps, wrong
from rank_processes import rank_processes

from harness.measure import measure_run
from harness.pool import RankPool
from harness.virtual_pool import VirtualPool
from semmoe.errors import UserError
from semmoe.results import check_row
from semmoe.rows import locality_columns
from semmoe.run import Run
from semmoe.traffic import count_traffic
from tests.harness.measure_kit import build

SIZES = (0, 1, 7, 64, 1000)
PRICED = ("flow=tp_shuffled", "token_scheduler=priced", "placement=random")


def device_run(ranks: int, predictor: str, *overrides: str) -> Run:
    on = ("cluster=h100x8", f"ep_size={ranks}", "dtype=fp32") if ranks > 4 else (f"ep_size={ranks}",)
    return build(*PRICED, *on, f"predictor={predictor}", "measure.plan=device", *overrides)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("predictor", ["device_ngram", "paper"])
def test_virtual_ranks_plan_as_the_host_does(ranks: int, predictor: str) -> None:
    run = device_run(ranks, predictor, "transport=virtual")
    steps_G = virtual_steps(run, SIZES)
    for i, tokens in enumerate(SIZES):
        assert wrong(run, tokens, [steps[i] for steps in steps_G]) == [], tokens


@pytest.mark.parametrize("transport", ["collective", "shared"])
def test_processes_plan_as_the_host_does(transport: str) -> None:
    run = device_run(4, "paper", f"transport={transport}")
    steps_G = rank_processes().run(process_steps, run, SIZES)
    for i, tokens in enumerate(SIZES):
        assert wrong(run, tokens, [steps[i] for steps in steps_G]) == [], tokens


def test_kernels_plan_as_the_host_does() -> None:
    """In the interpreter: planning alone for every number of ranks and size, whole layers for few tokens."""
    pytest.importorskip("triton")
    cases = [(1, 7), (2, 64), (4, 1), (4, 0), (8, 1000)]
    runs = [(device_run(ranks, "paper", "transport=virtual"), tokens) for ranks, tokens in cases]
    rank_processes().run(on_rank_zero, plan_cases.check_planned_by_kernels, (runs, 3))
    run = device_run(2, "paper", "transport=virtual", "transport.kernels=triton", *TOY)
    steps_G = rank_processes().run(on_rank_zero, virtual_steps, (run, (7,)))[0]
    assert wrong(run, 7, [steps[0] for steps in steps_G]) == []


TOY = (
    "trace=synthetic", "trace.requests=8", "trace.prompt_len=4", "trace.output_len=4", "trace.groups=2", "trace.topics=2",
    "model.num_layers=3", "model.layer_ids=[0,1,2]", "model.num_experts=8", "model.top_k=2", "model.hidden=32",
    "model.expert_ffn=16",
)  # fmt: skip


@pytest.mark.parametrize("fault", ["table", "stale"])
def test_a_wrong_table_or_a_stale_id_is_seen(fault: str) -> None:
    """Negative control: ranks still agree with each other, but no longer with the host."""
    run = device_run(4, "device_ngram", "transport=virtual")
    found = wrong(run, 64, [steps[0] for steps in virtual_steps(run, (64,), fault)])
    assert any(line.startswith("home of token") for line in found)
    assert any(line.startswith("assignment_pairs_LGG") for line in found)


def test_a_row_says_who_planned_and_joins_the_hosts() -> None:
    run, host = (device_run(2, "paper", "transport=virtual", f"measure.plan={plan}") for plan in ("device", "host"))
    with VirtualPool(2) as pool:
        rows = [check_row(measure_run(pool, one)[0]) for one in (run, host)]
    assert [row["planned_on"] for row in rows] == ["device", "host"]
    assert rows[0]["config_id"] == rows[1]["config_id"] and rows[0]["settings_digest"] != rows[1]["settings_digest"]
    counted = [key for key in rows[0] if key.endswith(("_measured", "_bytes")) or key.startswith("imbalance")]
    assert len(counted) > 8 and {k: rows[0][k] for k in counted} == {k: rows[1][k] for k in counted}
    for row in rows:
        assert 0 < row["plan_ms"] < row["layer_ms"] and row["output_error"] < 1e-5


def test_a_served_run_plans_every_step_on_its_ranks() -> None:
    run = device_run(2, "paper", "transport=shared", "workload=serve", "workload.num_requests=3", "workload.max_output=4",
                     "workload.max_prompt=40", "workload.rate_rps=200")  # fmt: skip
    with RankPool(2) as pool:
        row, log, _ = measure_run(pool, run)
    meter, planner = run.meter(), run.planner()
    assert log is not None and row["planned_on"] == "device"
    for rows_T, queue_T in log.token_rows():
        routed = planner.route(rows_T, queue_T)
        meter.add(count_traffic(routed.slots_TLk, routed.homes_TL, run.recipe.slots, run.ep_size, run.spec))
    for name, value in check_row(row | locality_columns(meter, "measured")).items():
        assert check_row(row)[name] == value, name


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        ("flow=dp plans no homes layer by layer; set flow=tp_shuffled", ("flow=dp",)),
        ("token scheduler Semantic has no device form; set token_scheduler=priced", ("token_scheduler=semantic",)),
        ("predictor Oracle is no look-up in tables; set predictor=paper", ("predictor=oracle",)),
        ("predictor none is no look-up in tables", ("predictor=none",)),
        ("the host chooses among replicas .40 slots.; set placement.slots=null", ("placement.slots=40",)),
    ],
)  # fmt: skip
def test_what_has_no_device_form_is_refused_with_the_remedy(said: str, overrides: tuple[str, ...]) -> None:
    named = {o.split("=")[0] for o in overrides}
    rest = [
        o
        for o in (*PRICED, "predictor=paper", "transport=virtual", "measure.plan=device")
        if o.split("=")[0] not in named
    ]
    with VirtualPool(2) as pool, pytest.raises(UserError, match=f"measure.plan=device: {said}.* or leave planning to"):
        measure_run(pool, build(*rest, *overrides))


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError, match=r"measure\.plan=devise must be one of host, device"):
        build("measure.plan=devise")
