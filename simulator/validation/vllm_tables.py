"""Operator tables of Qwen3-30B-A3B on one RTX PRO 6000, and the time of one data-parallel step made of them.

A step of two attention-DP ranks with the experts split over both (EP2), all-gather and reduce-scatter between them:

    layers * ( slowest rank's [2 layernorms, qkv, qk norm, rotary, attention, o_proj]
               + all-gather of rows and router scores + experts + reduce-scatter )
    + embedding, final norm, LM head, sampler of the slower rank + host time

Every time is measured [casys-kaist/LLMServingSim@5daddb21 (operators), ai-dynamo/aiconfigurator@095f58a5 (NCCL 2.29.2
over two of these GPUs)]; only the host times are set, see vllm_run. Rows are padded to the longer rank's, as in
lock-step attention-DP. Experts that get a token: expected for popularity given by `skew`, see `active_experts`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.special import ndtri

from semmoe.specs import Curve

from ..cost.curves import LatencyCurve
from ..cost.expert_table import ExpertTable
from .row import Float, read

PREFIX = "llmservingsim_rtxpro6000_qwen3_30b_"
LAYERS, HIDDEN, EXPERTS, TOP_K, RANKS = 48, 2048, 128, 8, 2
PER_LAYER = ("layernorm", "layernorm", "qkv_proj", "qk_norm", "rotary_emb", "o_proj")
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # the lattice on which all four axes of attention were measured
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128)


class Lattice:
    """Linear interpolation of times on a full lattice, held at its edges."""

    def __init__(self, table: pd.DataFrame, axes: dict[str, tuple[int, ...]]) -> None:
        index = pd.MultiIndex.from_product(list(axes.values()), names=list(axes))
        times = table.groupby(list(axes)).time_us.mean().reindex(index)
        if times.isna().any():
            raise ValueError(
                f"attention table lacks {int(times.isna().sum())} of {len(times)} points over {list(axes)}"
            )
        shape = [len(values) for values in axes.values()]
        self._low, self._high = (np.array([end(v) for v in axes.values()], dtype=float) for end in (min, max))
        self._at = RegularGridInterpolator(tuple(axes.values()), times.to_numpy().reshape(shape))

    def time_us(self, *point: float) -> float:
        return float(self._at(np.clip(np.array(point, dtype=float), self._low, self._high))[0])


class AttentionLattice:
    """One call of the attention kernel: a prefill chunk over earlier KV beside `decodes` sequences of a mean length."""

    def __init__(self, table: pd.DataFrame) -> None:
        def only(name: str, zero: bool) -> pd.DataFrame:
            return table[(table[name] == 0) == zero]

        prefill, decode = only("n_decode", True), only("prefill_chunk", True)
        earlier = (0, *LENGTHS)
        self._prefill = Lattice(prefill, {"prefill_chunk": CHUNKS, "kv_prefill": earlier})
        self._decode = Lattice(decode, {"n_decode": (*DECODES, 256), "kv_decode": LENGTHS})
        axes = {"prefill_chunk": CHUNKS, "kv_prefill": earlier, "n_decode": DECODES, "kv_decode": LENGTHS}
        self._both = Lattice(table, axes)

    def time_us(self, chunk: float, earlier: float, decodes: float, kv: float) -> float:
        if not chunk:
            return self._decode.time_us(decodes, kv) if decodes else 0.0
        return self._both.time_us(chunk, earlier, decodes, kv) if decodes else self._prefill.time_us(chunk, earlier)


def active_experts(tokens: float, skew: float) -> float:
    """Expected experts of one rank (half of all) that get a token, of `tokens` tokens with TOP_K experts each.

    Popularity of the rank's experts: lognormal with this sigma in the logarithm, at its quantiles; 0 is even.
    """
    half = EXPERTS // RANKS
    quantile = (np.arange(half) + 0.5) / half
    weight = np.exp(skew * ndtri(quantile))
    chance = np.minimum(weight / weight.mean() * TOP_K / EXPERTS, 1.0)
    return float((1 - (1 - chance) ** tokens).sum())


class OperatorTables:
    """All tables of a folder of measured data."""

    def __init__(self, data: Path) -> None:
        dense = read(data / f"{PREFIX}dense.csv", ("layer", "tokens", "time_us"))
        sequence = read(data / f"{PREFIX}per_sequence.csv", ("layer", "sequences", "time_us"))
        moe = read(data / f"{PREFIX}moe.csv", ("tokens", "activated_experts", "time_us"))
        nccl = read(data / "nccl_intranode.csv", ("system", "op", "num_gpus", "bytes", "latency_us", "dtype"))
        nccl = nccl[(nccl.system == "rtx_pro_6000_server") & (nccl.num_gpus == RANKS) & (nccl.dtype == "half")]
        self._dense = {str(n): _curve(g.tokens, g.time_us) for n, g in dense.groupby("layer")}
        self._sequence = {str(n): _curve(g.sequences, g.time_us) for n, g in sequence.groupby("layer")}
        self._nccl = {str(n): _curve(g.bytes, g.latency_us) for n, g in nccl.groupby("op")}
        self.experts = ExpertTable(zip(moe.tokens, moe.activated_experts, moe.time_us, strict=True))
        columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
        self.attention = AttentionLattice(read(data / f"{PREFIX}attention.csv", columns))

    def layer_us(self, tokens_G: NDArray[np.int64], attention_us_G: Float, skew: float) -> float:
        """One layer of the lock-step ranks."""
        own = [
            sum(float(self._dense[name].time_us(n)) for name in PER_LAYER) + attention if n else 0.0
            for n, attention in zip(tokens_G, attention_us_G, strict=True)
        ]
        total, padded = int(tokens_G.sum()), RANKS * int(tokens_G.max())
        # half of the (token, expert) rows fall on each rank: as many as `total / RANKS` tokens have in the table
        experts = float(self.experts.time_us(total / RANKS, active_experts(total, skew)))
        gathered = self._nccl["all_gather"]
        exchange = float(gathered.time_us(padded * HIDDEN * 2)) + float(gathered.time_us(padded * EXPERTS * 2))
        return max(own) + experts + exchange + float(self._nccl["reduce_scatter"].time_us(padded * HIDDEN * 2))

    def outside_us(self, tokens_G: NDArray[np.int64], sequences_G: NDArray[np.int64]) -> float:
        """What comes before and after the layers, on the slower rank."""
        times = [
            sum(float(self._dense[name].time_us(n)) for name in ("embedding", "final_layernorm"))
            + sum(float(curve.time_us(s)) for curve in self._sequence.values())
            for n, s in zip(tokens_G, sequences_G, strict=True)
            if n
        ]
        return max(times)


def _curve(x: pd.Series, us: pd.Series) -> LatencyCurve:
    order = np.argsort(x.to_numpy())
    return LatencyCurve(Curve(op="operator", ranks=1, bytes=tuple(x.iloc[order]), latency_us=tuple(us.iloc[order])))
