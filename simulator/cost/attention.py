"""Attention of one layer by roofline, grouped-query and latent (MLA), prefill and decode. Marked "roofline".

Projections are dense products. The core of a prefill chunk of c tokens that starts at position s looks at
c * s + c * (c + 1) / 2 (query, key) pairs; a decode token at KV length n looks at n keys and streams them from memory.
MLA decodes in latent space: one row of kv_lora_rank + rope_head_dim per token, shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semmoe.serving import DECODE, StepPlan
from semmoe.specs import ClusterSpec, ModelSpec

from .dense import GemmRoofline

Float = NDArray[np.float64]
PREFILL_MFU = 0.5  # of peak, flash attention at long sequences
KV_BYTES = 2.0  # bf16 cache


@dataclass(frozen=True, eq=False)
class AttentionLoad:
    """What each rank's attention has to do in one step (one entry in attention-TP, where all ranks do the same)."""

    tokens_G: Float
    sequences_G: Float
    prefill_pairs_G: Float
    decode_kv_G: Float

    @classmethod
    def of(cls, step: StepPlan, ranks: int) -> AttentionLoad:
        """Sums over the entries of a step. ranks: queues of the serving loop."""
        start, count = step.start_N.astype(np.float64), step.count_N.astype(np.float64)
        decode = step.phase_N == DECODE
        pairs = count * start + count * (count + 1) / 2
        rank = step.rank_N
        sums = [
            np.bincount(rank, weights=weight_N, minlength=ranks).astype(np.float64)
            for weight_N in (count, np.ones_like(count), np.where(decode, 0.0, pairs), np.where(decode, start + 1, 0.0))
        ]
        return cls(*sums)


class AttentionCost:
    """Microseconds of one attention block; heads and weights are split over `attention_tp` ranks."""

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> None:
        self.model, self.gemm = model, GemmRoofline(cluster)
        self.tp = attention_tp
        self._bytes_per_us = cluster.memory_efficiency * cluster.memory_gbps * 1e3
        self._flops_per_us = PREFILL_MFU * cluster.bf16_tflops * 1e6
        self._floor_us = float(cluster.host_us.get("attention", 12.0))
        heads = max(model.num_heads / attention_tp, 1.0)
        if model.attention == "mla":
            latent = model.kv_lora_rank + model.rope_head_dim
            self._kv_row_bytes = latent * KV_BYTES  # not split: every rank holds the latent row
            self._decode_flops = 2.0 * heads * (latent + model.kv_lora_rank)
            self._prefill_flops = 2.0 * heads * (model.head_dim + model.rope_head_dim + model.v_head_dim)
        else:
            self._kv_row_bytes = 2 * max(model.num_kv_heads / attention_tp, 1.0) * model.head_dim * KV_BYTES
            self._decode_flops = self._prefill_flops = 4.0 * heads * model.head_dim

    def time_us(self, load: AttentionLoad) -> Float:
        """Per rank."""
        projections = self.gemm.time_us(load.tokens_G, self.model.attention_params / self.tp, self.model.weight_dtype)
        prefill = load.prefill_pairs_G * self._prefill_flops / self._flops_per_us
        decode = load.decode_kv_G * max(
            self._kv_row_bytes / self._bytes_per_us, self._decode_flops / self._flops_per_us
        )
        busy = load.tokens_G > 0
        return np.where(busy, projections + np.maximum(prefill + decode, self._floor_us), 0.0)
