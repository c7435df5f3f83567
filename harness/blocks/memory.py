"""What a stack of blocks takes in memory on one rank, before anything of it is made."""

from __future__ import annotations

from semmoe.run import Run
from semmoe.specs import DTYPE_BYTES

from .head_shard import HeadShard
from .stack import most_queue_tokens


def block_bytes(run: Run) -> tuple[int, int]:
    """(bytes of everything but the routed experts: attention weights and caches, dense and shared feed-forwards, LM head,
    the largest fp32 matrix while it is made; what the reference of one block takes beside). UserError for heads that
    cannot be shared."""
    model, flow, width = run.model, run.spec.flow, DTYPE_BYTES[run.spec.activation_dtype]
    ranks = 1 if flow == "dp" else run.ep_size
    shard = HeadShard(model, 0, ranks)
    sequences, positions = run.batch_form.sequences(most_queue_tokens(run)), run.batch_form.positions
    cached = sequences * positions * shard.kv_row
    dense = 3 * model.hidden * model.dense_ffn * (model.num_layers - model.num_moe_layers) / ranks
    split = ranks if flow == "tp_replicated" else 1
    shared = 3 * model.hidden * model.shared_experts * model.shared_ffn * model.num_moe_layers / split
    head = model.vocab_size * model.hidden
    kept = model.num_layers * (shard.weights + cached) + dense + shared + head / ranks
    whole = HeadShard(model)
    reference = max(whole.weights + sequences * positions * whole.kv_row * run.ep_size // ranks, head)
    largest = max(head, model.hidden * model.dense_ffn, sequences * positions * whole.kv_row)
    return int(kept * width + largest * 4), int(reference * 4)
