"""Fixed batches of whole models: a full row beside the simulator's, and faults of a block seen before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.blocks.attention import Caches, make_attention
from harness.blocks.check import check_blocks
from harness.blocks.head_shard import HeadShard
from harness.blocks.memory import block_bytes
from harness.blocks.stack import BlockStack
from harness.blocks.weights import BlockWeights
from harness.measure import check_measurable, measure_run
from harness.pool import RankError, RankPool
from harness.worker import RankContext
from semmoe.errors import UserError
from semmoe.run import Run
from simulator.app import simulate
from tests.harness.measure_kit import build

WHOLE = ("scope=full_model", "measure.warmup=0", "workload.context_tokens=20")
LATENT = (
    "model=deepseek-v2-lite",
    "model_scale=.02",
    "model.vocab_size=64",
    "trace=synthetic",
    "trace.requests=8",
    "workload.max_batches=1",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "overrides",
    [
        ("flow=dp", "measure.feed=hidden"),
        ("flow=tp_shuffled", "token_scheduler=sort_cut", "workload.form=decode", "transport=shared"),
        ("flow=tp_scattered", "workload.form=decode", *LATENT),
    ],
)
def test_a_whole_model_has_a_row_whose_traffic_and_columns_are_the_simulators(
    pool: RankPool, overrides: tuple[str, ...]
) -> None:
    run = build(*WHOLE, *overrides)
    row, *_ = measure_run(pool, run)
    predicted = simulate(build(*WHOLE, *overrides))
    assert row["config_id"] == predicted["config_id"] and row["scope"] == predicted["scope"] == "full_model"
    assert 0 < row["output_error"] < 1e-5
    for column in ("lar", "fan_out", "bytes_per_token"):
        assert row[f"{column}_measured"] == predicted[f"{column}_replayed"]
    for column in ("attention_ms", "layer_ms", "step_ms"):
        assert row[column] > 0 and predicted[column] > 0
    assert row["cuda_graph"].startswith("off")


def spoiled_task(context: RankContext, run: Run) -> Any:
    """The check before a measurement, where rank 1 has mixed up the heads of block 3."""
    stack, planner = BlockStack(context, run), run.planner()
    if context.rank == 1:
        attention: Any = stack.blocks.blocks[3].attention
        attention.o_HO = attention.o_HO.roll(1, dims=1)
    routed = planner.route(*next(iter(run.batch_steps())))
    return check_blocks(stack, routed, stack.inputs(routed))


def test_mixed_up_heads_are_noticed_and_their_block_named() -> None:
    with RankPool(2) as pool, pytest.raises(RankError, match="output of block 3 differs from the single-process"):
        pool.run(spoiled_task, build(*WHOLE, "flow=tp_shuffled"))


def test_bytes_are_those_of_the_tensors() -> None:
    run = build(*WHOLE, "flow=tp_replicated", "dispatcher=none", "workload.form=decode")
    weights, shard, form = BlockWeights(run.model), HeadShard(run.model, 0, 2), run.batch_form
    attention: Any = make_attention(weights, 0, shard, Caches(0, form.sequences(48), form.positions))
    tensors = (attention.qkv_OH, attention.o_HO, attention.key_BKSD, attention.value_BKSD)
    kept = run.model.num_layers * sum(t.numel() for t in tensors)
    head = run.model.vocab_size * run.model.hidden
    assert block_bytes(run)[0] == 4 * (kept + head // 2) + 4 * head, "and the head while it is made"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("flow=tp_scattered", "model.num_heads=3", "model.num_kv_heads=3"), "3 attention heads cannot be split"),
        (("flow=tp_shuffled", "token_scheduler=rehome"), "moves outputs, not residual rows"),
    ],
)
def test_what_a_stack_of_blocks_cannot_do_is_said(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_measurable(build(*WHOLE, *overrides))
