"""Cases of a stack of transformer blocks: what all ranks know, the body that a virtual rank runs, and the oracle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from layer_cases import EXPERTS, LAYER_IDS, LAYERS, TOP_K, CaseWeights, make_placement, relative_error

from harness.blocks import reference
from harness.blocks.attention import Caches, Sequences, make_attention
from harness.blocks.forward import Blocks
from harness.blocks.head_shard import HeadShard
from harness.blocks.weights import BlockWeights
from harness.layer import Routes, build_layers
from harness.reference.experts import moe_reference
from harness.reference.gate import Gating
from harness.stack import LayerInput
from harness.transport.virtual import run_virtual
from semmoe.batch_form import BatchForm
from semmoe.dispatch import DispatchSpec
from semmoe.specs import ModelSpec

FLOWS = ("dp", "tp_replicated", "tp_scattered", "tp_shuffled")
SHAPE: dict[str, Any] = {
    "name": "small",
    "hidden": 16,
    "num_layers": LAYERS + 1,
    "layer_ids": LAYER_IDS,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "expert_ffn": 16,
    "vocab_size": 37,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "dense_ffn": 21,
}
MODELS = {
    "gqa": ModelSpec(**SHAPE),
    "mla": ModelSpec(
        **SHAPE,
        attention="mla",
        q_lora_rank=12,
        kv_lora_rank=10,
        rope_head_dim=4,
        v_head_dim=6,
        shared_experts=2,
        shared_ffn=9,
    ),
}
FORMS = {"prefill": BatchForm("prefill", 5), "decode": BatchForm("decode", 9)}


@dataclass(frozen=True, eq=False)
class Stack:
    """One case: what all ranks know of it."""

    flow: str
    ranks: int
    tokens: int
    model: ModelSpec
    form: BatchForm
    kernels: str = "torch"

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.tokens + 7 * self.ranks)
        made = {
            "x_TH": torch.from_numpy(rng.standard_normal((self.tokens, 16)).astype(np.float32)),
            "experts_TLk": rng.random((self.tokens, LAYERS, EXPERTS)).argsort(axis=2)[:, :, :TOP_K],
            "weights_TLk": torch.from_numpy(rng.random((self.tokens, LAYERS, TOP_K)).astype(np.float32)),
            "placement": make_placement("random", self.ranks, rng),
            "homes_TL": rng.integers(0, self.ranks, (self.tokens, LAYERS)),
        }
        if self.flow == "dp":
            made["homes_TL"][:] = made["homes_TL"][:, :1]
        if self.flow == "tp_scattered":
            made["homes_TL"].sort(axis=0)
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def sequences(self) -> int:
        return self.form.sequences(self.tokens)

    @property
    def plan(self) -> Any:
        counts = np.bincount(self.homes_TL[:, 0], minlength=self.ranks) if self.flow == "dp" else [self.tokens]
        return self.form.plan(counts)

    def on_rank(self, transport: Any, spoil: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual stream, logits) of this rank."""
        spec = DispatchSpec(
            flow=self.flow,
            dispatcher=None if self.flow == "tp_replicated" else "a2a_dedup",
            hidden=16,
            top_k=TOP_K,
            activation_dtype="fp32",
        )
        layers = build_layers(transport, spec, self.placement, CaseWeights(16), Gating(top_k=TOP_K), max_tokens=64)
        blocks = Blocks(transport, self.model, layers, max(self.sequences, 1), self.form.positions)
        if spoil is not None:
            spoil(blocks)
        dp, rank = self.flow == "dp", transport.rank
        mine = np.flatnonzero(self.homes_TL[:, 0] == rank) if dp else np.arange(self.tokens)
        inputs = []
        for layer in range(LAYERS):
            slot_of = np.argsort(self.placement.physical_to_logical_LP[layer])
            slots = torch.from_numpy(slot_of[self.experts_TLk[mine, layer]])
            homes_T = None if self.flow == "tp_replicated" else self.homes_TL[:, layer]
            inputs.append(LayerInput(self.x_TH, Routes(slots, self.weights_TLk[mine, layer]), homes_T, mine))
        sequences = Sequences.of(self.plan, rank if dp else 0)
        (x,) = deque(blocks.run(self.x_TH[mine], inputs, sequences), maxlen=1)
        return x, blocks.logits(x, sequences)

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(last residual stream, logits) of all tokens in the order of the plan's entries, in one process."""
        weights, source = BlockWeights(self.model), CaseWeights(16)
        x_TH, order = self.x_TH[self.order], torch.from_numpy(self.order)
        moe = {layer: i for i, layer in enumerate(self.model.layer_ids)}
        for layer in range(self.model.num_layers):
            experts = None
            if layer in moe:
                pairs = [source.expert(moe[layer], e) for e in range(EXPERTS)]
                w13, w2 = (torch.stack([pair[i] for pair in pairs]) for i in range(2))
                chosen = torch.from_numpy(self.experts_TLk[:, moe[layer]])[order]
                shares = self.weights_TLk[:, moe[layer]][order]

                def experts(rows, chosen=chosen, shares=shares, w13=w13, w2=w2):  # type: ignore[no-untyped-def]
                    return moe_reference(rows, chosen, shares, w13, w2)

            most = max(self.sequences, 1)
            x_TH = reference.block(weights, layer, x_TH, self.plan, most, self.form.positions, experts)
        last_B = np.cumsum(self.plan.count_N) - 1
        return x_TH, reference.logits(weights, x_TH[last_B])

    @property
    def order(self) -> np.ndarray:
        """Tokens by queue."""
        return np.argsort(self.homes_TL[:, 0], kind="stable") if self.flow == "dp" else np.arange(self.tokens)

    def errors(self, spoil: Any = None) -> list[float]:
        """Relative errors of streams and logits of every rank."""
        want_TH, want_BV = self.want()
        found = run_virtual(self.ranks, lambda transport: self.on_rank(transport, spoil), self.kernels)
        if self.flow == "dp":
            streams = [torch.cat([stream for stream, _ in found])]
            logits = torch.cat([logits for _, logits in found])
        else:
            streams = [stream for stream, _ in found]
            logits = torch.cat([logits for _, logits in found], dim=1)
        return [*(relative_error(stream, want_TH) for stream in streams), relative_error(logits, want_BV)]


Spoil = Callable[[Blocks], None]


def wrong_heads(blocks: Blocks) -> None:
    """Rank 1 has the heads of rank 0 in one block."""
    if blocks.transport.rank == 1:
        shard = blocks.shard if blocks.dp else HeadShard(blocks.model, 0, 2)
        attention: Any = make_attention(blocks.weights, 1, shard, Caches(0, 7, 10))
        blocks.blocks[1] = replace(blocks.blocks[1], attention=attention)
        if blocks.dp:  # all heads are there: mix them up
            attention.o_HO = attention.o_HO.roll(1, dims=1)


def no_residual(blocks: Blocks) -> None:
    """One block forgets what came in."""
    attend = blocks.attend

    def forgets(block: Any, x: torch.Tensor, sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        stream, rows = attend(block, x, sequences)
        return (torch.zeros_like(stream) if block is blocks.blocks[1] else stream), rows

    blocks.attend = forgets  # type: ignore[method-assign]


def other_norm(blocks: Blocks) -> None:
    """One block normalises what its MoE layer reads with the weights of other columns."""
    blocks.blocks[1] = replace(blocks.blocks[1], post_norm_H=blocks.blocks[1].post_norm_H.roll(1))


def errors_by_kernels(cases: list[tuple[Stack, Any]]) -> list[float]:
    """The largest error of every (case, spoil) in the interpreter: TRITON_INTERPRET=1 was set before the kernels."""
    return [max(stack.errors(spoil)) for stack, spoil in cases]
