"""The served tiny model on several ranks gives the logits of the whole model in one process, and its run a full row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.measure import check_measurable, measure_run  # noqa: E402
from harness.models.checkpoint import load_model  # noqa: E402
from harness.pool import RankError, RankPool  # noqa: E402
from harness.serving import full_model  # noqa: E402
from harness.serving.check import check_full, reference_logits  # noqa: E402
from harness.serving.full_model import FullModel  # noqa: E402
from harness.serving.sequences import Batch  # noqa: E402
from harness.worker import RankContext  # noqa: E402
from semmoe.errors import UserError  # noqa: E402
from semmoe.run import Run  # noqa: E402
from semmoe.serving import DECODE, PREFILL, StepPlan, TokenRows  # noqa: E402
from simulator.app import simulate  # noqa: E402
from tests.harness.measure_kit import build  # noqa: E402

SMALL = (
    "scope=full_model",
    "workload=serve",
    "workload.num_requests=8",
    "workload.arrivals=all_at_once",
    "workload.max_output=6",
    "serving.max_batch_tokens=96",
)
FLOWS = {
    "tp_replicated": ("flow=tp_replicated", "dispatcher=none"),
    "tp_scattered": ("flow=tp_scattered", "dispatcher=a2a_assignment"),
    "tp_shuffled": ("flow=tp_shuffled", "token_scheduler=sort_cut", "transport=shared"),
}
# queue (dp: a rank; tp flows have one), request, phase, start, count: chunks of three prompts, a step in which rank 1 idles,
# decode beside prefill, request 0 restarted, one token alone
STEPS = [
    [(0, 0, PREFILL, 0, 7), (0, 2, PREFILL, 0, 1), (1, 1, PREFILL, 0, 12)],
    [(0, 0, PREFILL, 7, 9), (0, 2, PREFILL, 1, 5)],
    [(0, 2, PREFILL, 6, 10), (1, 1, PREFILL, 12, 4)],
    [(0, 0, PREFILL, 0, 16), (1, 1, DECODE, 16, 1), (0, 2, DECODE, 16, 1)],
    [(0, 0, DECODE, 16, 1), (1, 1, DECODE, 17, 1), (0, 2, DECODE, 17, 1)],
    [(0, 0, DECODE, 17, 1)],
]
PROMPT = 16


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step_task(context: RankContext, run: Run) -> list[tuple[int, int, list[int], Any]]:
    """(request, position of the last token, inputs so far, logits) of every entry of this rank's queue in STEPS."""
    full, planner = FullModel(context, run), run.planner()
    rows = TokenRows.of(run.workload.requests)
    seen = []
    for index, steps in enumerate(STEPS):
        entries = [(queue if run.spec.flow == "dp" else 0, *entry) for queue, *entry in steps]
        plan = StepPlan(index, *np.array(entries, dtype=np.int64).T)
        result = full.step(plan, planner.route(*plan.token_rows(rows)))
        assert len(result.attention_ns_L) == len(result.layer_ns_L) == 6
        if run.spec.flow == "tp_scattered" and plan.num_tokens == 1 and context.rank:
            assert {counts.homes for counts in result.counter.layers} == {0}, "a rank without tokens"
        mine = [entry for entry in entries if entry[0] == full.own.queue]
        for (_, request, _, start, count), logits in zip(mine, result.logits_NV, strict=True):
            tokens = full.own.sequences[request].tokens_S[: start + count].tolist()
            seen.append((request, start + count, tokens, logits.numpy()))
    return seen


def small(*overrides: str) -> Run:
    return build(*SMALL, f"workload.max_prompt={PROMPT}", "serving.max_batch_tokens=32", *overrides)


@pytest.mark.parametrize(
    ("dispatcher", "transport"),
    [
        ("a2a_dedup", "shared"),
        ("a2a_assignment", "collective"),
        ("allgather_rs", "collective"),
        ("low_latency,dispatcher.dispatch_dtype=fp32,dispatcher.combine_dtype=fp32", "shared"),
    ],
)
def test_greedy_logits_and_tokens_are_those_of_one_process(pool: RankPool, dispatcher: str, transport: str) -> None:
    run = small(
        "measure.tokens=greedy", *f"dispatcher={dispatcher}".split(","), f"transport={transport}", "placement=random"
    )
    assert_greedy(run, [row for of_rank in pool.run(step_task, run) for row in of_rank])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_the_heads_all_decide_the_tokens_of_one_process(pool: RankPool, ranks: int) -> None:
    with nullcontext(pool) if ranks == pool.ranks else RankPool(ranks) as ranks_pool:
        for flow in FLOWS.values():
            run = small("measure.tokens=greedy", *flow, f"ep_size={ranks}", "placement=random", "cluster.file=null")
            first, *others = ranks_pool.run(step_task, run)
            assert_greedy(run, first)
            for of_rank in others:
                for (*entry, logits), (*same, first_logits) in zip(of_rank, first, strict=True):
                    assert entry == same
                    np.testing.assert_array_equal(logits, first_logits)


def assert_greedy(run: Run, seen: list[tuple[int, int, list[int], Any]]) -> None:
    """All entries of STEPS, with the logits of the model in one process and the tokens that it generates."""
    model = load_model()
    assert len(seen) == sum(len(entries) for entries in STEPS)
    for request, position, tokens, logits in seen:
        start = run.workload.requests[request].token_start
        prompt = run.heldout.token_id_T[start : start + PROMPT].tolist()
        with torch.no_grad():
            want = model(torch.tensor([tokens]))[0, position - 1]
        torch.testing.assert_close(torch.from_numpy(logits), want, rtol=1e-4, atol=1e-4)
        generated = model.generate(torch.tensor([prompt]), 2)[0].tolist()
        assert tokens == generated[:position], "greedy tokens, and the same after a restart"


def test_forced_tokens_and_experts_are_the_traces(pool: RankPool) -> None:
    run, model = small("measure.tokens=forced"), load_model()
    for of_rank in pool.run(step_task, run):
        for request, position, tokens, logits in of_rank:
            start = run.workload.requests[request].token_start
            assert tokens == run.heldout.token_id_T[start : start + position].tolist()
            experts = torch.from_numpy(run.heldout.experts_TLk[start : start + position].astype(np.int64))
            want, flips = reference_logits(model, torch.tensor(tokens), experts)
            torch.testing.assert_close(torch.from_numpy(logits), want[-1], rtol=1e-4, atol=1e-4)
            if position == PROMPT:
                free, _ = reference_logits(model, torch.tensor(tokens), None)
                assert flips and (free[-1] - want[-1]).abs().max() > 0.01, "a cut prompt: forcing must matter here"


def test_the_reference_is_the_models_own_forward() -> None:
    model = load_model()
    tokens = torch.randint(1, 4096, (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model(tokens[None])[0]
    torch.testing.assert_close(reference_logits(model, tokens, None)[0], want, rtol=1e-4, atol=1e-4)


def spoiled_check_task(context: RankContext, run: Run) -> Any:
    """The check before a served run, where rank 1 forgets one key of its caches."""
    full = FullModel(context, run)
    block = full.attention.block

    def forgets(layer: int, x_nH: Any, batch: Batch) -> Any:
        if context.rank == 1 and layer == 3:
            for entry in batch.entries:
                entry.sequence.key_LKSD[2, 0, 1] = 0.0
        return block(layer, x_nH, batch)

    full.attention.block = forgets  # type: ignore[method-assign]
    return check_full(full, run.planner())


@pytest.mark.parametrize("flow", [("flow=dp",), FLOWS["tp_shuffled"]])
def test_a_spoiled_cache_is_noticed_before_anything_is_timed(flow: tuple[str, ...]) -> None:
    with RankPool(2) as pool, pytest.raises(RankError, match="logits differ from the single-process model"):
        pool.run(spoiled_check_task, build(*SMALL, *flow))


@pytest.mark.parametrize("flow", [("flow=dp",), *FLOWS.values()])
def test_a_served_full_model_gives_measured_times_and_the_traffic_of_its_replay(
    pool: RankPool, tmp_path: Any, flow: tuple[str, ...]
) -> None:
    overrides = (*SMALL, *flow, "placement=random", "measure.warmup=0")
    run = build(*overrides)
    row, log, _ = measure_run(pool, run)
    assert log is not None and row["scope"] == "full_model"
    assert 0 < row["output_error"] < 1e-4
    assert row["route_flips"] < 0.01, "uncut requests: the gate agrees with its own trace"
    assert row["step_ms"] > 6 * row["attention_ms"] > 0
    assert row["e2e_ms"] > row["ttft_ms"] > row["tpot_ms"] > 0
    log.save(tmp_path / f"steps-{run.config_id}-r0.npz")
    assert any(set(plan.phase_N.tolist()) == {PREFILL, DECODE} for plan in log.plans), "prefill beside decode"
    replayed = simulate(build(*overrides, f"replay={tmp_path}"))
    assert replayed["config_id"] == row["config_id"]
    for column in ("tokens", "steps"):
        assert replayed[column] == row[column]
    for column in ("lar", "fan_out", "bytes_per_token"):
        np.testing.assert_array_equal(replayed[f"{column}_replayed"], row[f"{column}_measured"])
    for column in ("assignment_pairs", "rank_pairs", "imbalance_per_layer"):
        assert replayed[column] == row[column]


def test_the_check_keeps_to_the_tokens_of_a_step(pool: RankPool) -> None:
    low_latency = ("dispatcher=low_latency", "dispatcher.dispatch_dtype=fp32", "dispatcher.combine_dtype=fp32")
    overrides = (*SMALL, "flow=tp_scattered", *low_latency, "workload.num_requests=2", "serving.max_batch_tokens=2")
    row, *_ = measure_run(pool, build(*overrides, "workload.max_prompt=6", "workload.max_output=2", "measure.warmup=0"))
    assert 0 < row["output_error"] < 1e-4


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("measure.tokens=sampled",), "measure.tokens='sampled' must be one of forced, greedy"),
        (("model.num_heads=8",), "key-value heads, head size: .* use scope=moe_layers or workload=batches"),
        (("flow=tp_scattered", "cluster=h100x8", "ep_size=8"), "4 attention heads .* use a divisor of 4, or flow=dp"),
        (("flow=tp_shuffled", "token_scheduler=rehome"), "set scope=moe_layers or another token_scheduler"),
        (("flow=tp_shuffled", "token_scheduler=priced", "measure.plan=device"), "set scope=moe_layers"),
    ],
)
def test_what_a_full_model_cannot_do_is_said(overrides: tuple[str, ...], words: str) -> None:
    run = build(*SMALL, *overrides)
    with pytest.raises(UserError, match=words):
        check_measurable(run)
        full_model._check(run)
