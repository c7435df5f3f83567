"""Attention of one layer, grouped-query and latent (MLA), prefill and decode: measured tables, else by roofline.

Projections are dense products by roofline, always. A cluster may hold tables of measured kernels, `attention`: each with
its kind ("gqa", "mla"), phase ("prefill", "decode"), heads, kv_heads and head_dim, and lists `batch`, `length`, `us`.
They rule where a rank has just these heads; a rank's prompts are looked up as equal ones with as many (query, key)
pairs, its decoding sequences at their mean length. Prefill and decode of one step add up, decodes
times `mixed_decode` of the cluster: on the one GPU whose mixed calls are public (RTX PRO 6000, vLLM) adding up falls 28 %
short on average, for decodes beside a chunk take some 2.5 times as long as alone (results/validate.md).

Roofline: the core of a prefill chunk of c tokens that starts at position s looks at
c * s + c * (c + 1) / 2 (query, key) pairs; a decode token at KV length n looks at n keys and streams them from memory.
MLA decodes in latent space: one row of kv_lora_rank + rope_head_dim per token, shared by all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.serving import DECODE, StepPlan, Stretch
from semmoe.specs import ClusterSpec, ModelSpec

from .attention_table import AttentionTable
from .dense import GemmLaw

Float = NDArray[np.float64]
PREFILL_MFU = 0.5  # of peak, flash attention at long sequences
KV_BYTES = 2.0  # bf16 cache
PROJECTIONS = {"gqa": 2, "mla": 5}  # kernels: qkv and out; q down and up, kv down and up, out
TABLE_KEYS = ("kind", "phase", "heads", "kv_heads", "head_dim", "batch", "length", "us")


@dataclass(frozen=True, eq=False)
class AttentionLoad:
    """What each rank's attention has to do in one step (one entry in attention-TP, where all ranks do the same)."""

    tokens_G: Float
    sequences_G: Float
    prefill_pairs_G: Float
    decode_kv_G: Float
    decodes_G: Float | None = None  # sequences that decode; None: all, where there is any decode KV

    @classmethod
    def of(cls, step: StepPlan, ranks: int) -> AttentionLoad:
        """Sums over the entries of a step. ranks: queues of the serving loop."""
        start, count = step.start_N.astype(np.float64), step.count_N.astype(np.float64)
        decode = step.phase_N == DECODE
        pairs = count * start + count * (count + 1) / 2
        rank = step.rank_N
        sums = [
            np.bincount(rank, weights=weight_N, minlength=ranks).astype(np.float64)
            for weight_N in (
                count,
                np.ones_like(count),
                np.where(decode, 0.0, pairs),
                np.where(decode, start + 1, 0.0),
                decode.astype(np.float64),
            )
        ]
        return cls(*sums)

    @classmethod
    def of_stretch(cls, stretch: Stretch, tokens_SG: NDArray[np.int64]) -> AttentionLoad:
        """Of each of its steps, [S, G]."""
        ranks = tokens_SG.shape[1]
        first, rest = cls.of(stretch.first, ranks), stretch.rest
        entry_T, step_T = stretch.later_T
        kv_T = (rest.start_N[entry_T] + step_T).astype(np.float64)  # keys that a decode looks at, its own included
        at_T, shape = step_T * ranks + rest.rank_N[entry_T], tokens_SG.shape
        kv_SG = np.bincount(at_T, kv_T, shape[0] * ranks).astype(np.float64).reshape(shape)
        sequences_SG, decodes_SG, prefill_SG = (
            tokens_SG.astype(np.float64),
            tokens_SG.astype(np.float64),
            np.zeros(shape),
        )
        kv_SG[0], sequences_SG[0], prefill_SG[0] = first.decode_kv_G, first.sequences_G, first.prefill_pairs_G
        decodes_SG[0] = first.decodes_G
        return cls(tokens_SG.astype(np.float64), sequences_SG, prefill_SG, kv_SG, decodes_SG)


class AttentionCost:
    """Microseconds of one attention block; heads and weights are split over `attention_tp` ranks."""

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> None:
        self.model, self.gemm = model, GemmLaw(cluster)
        self.tp, self._mixed_decode = attention_tp, cluster.mixed_decode
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

        self._prefill_table = measured(cluster, model, attention_tp, "prefill")
        self._decode_table = measured(cluster, model, attention_tp, "decode")
        self.marks = {self.gemm.mark}  # projections
        if self._prefill_table or self._decode_table:
            self.marks.add("interpolated")

    def time_us(self, load: AttentionLoad) -> Float:
        """Per rank."""
        weights, kernels = self.model.attention_params / self.tp, PROJECTIONS[self.model.attention]
        projections = self.gemm.time_us(load.tokens_G, weights, self.model.weight_dtype, kernels)
        busy = load.tokens_G > 0
        decodes = np.where(load.decode_kv_G > 0, load.sequences_G, 0.0) if load.decodes_G is None else load.decodes_G
        prefill, decode = self._prefill_us(load, load.sequences_G - decodes), self._decode_us(load, decodes)
        core = prefill + decode * np.where((prefill > 0) & (decode > 0), self._mixed_decode, 1.0)
        return np.where(busy, projections + np.maximum(core, self._floor_us), 0.0)

    def _prefill_us(self, load: AttentionLoad, prompts_G: Float) -> Float:
        if self._prefill_table is None or not prompts_G.any():
            return load.prefill_pairs_G * self._prefill_flops / self._flops_per_us
        pairs = load.prefill_pairs_G / np.maximum(prompts_G, 1.0)
        return self._prefill_table.time_us(prompts_G, (np.sqrt(1 + 8 * pairs) - 1) / 2)  # n prompts of pairs = l(l+1)/2

    def _decode_us(self, load: AttentionLoad, decodes_G: Float) -> Float:
        if self._decode_table is None or not decodes_G.any():
            row_us = max(self._kv_row_bytes / self._bytes_per_us, self._decode_flops / self._flops_per_us)
            return load.decode_kv_G * row_us
        return self._decode_table.time_us(decodes_G, load.decode_kv_G / np.maximum(decodes_G, 1.0))


@cache
def _table(points: tuple[tuple[float, float, float], ...], power: int) -> AttentionTable:
    return AttentionTable(points, power)


def measured(cluster: ClusterSpec, model: ModelSpec, attention_tp: int, phase: str) -> AttentionTable | None:
    """The cluster's table of just this rank's attention, or None."""
    heads = model.num_heads / attention_tp
    for raw in cluster.attention:
        missing = [key for key in TABLE_KEYS if key not in raw]
        if missing:
            raise UserError(f"cluster {cluster.name}: an attention table lacks {', '.join(missing)}")
        same = raw["kind"] == model.attention and raw["phase"] == phase and raw["heads"] == heads
        if same and model.attention == "gqa":
            same = raw["kv_heads"] == model.num_kv_heads / attention_tp and raw["head_dim"] == model.head_dim
        if same:
            points = zip(raw["batch"], raw["length"], raw["us"], strict=True)
            return _table(tuple(points), 2 if phase == "prefill" else 1)
    return None
