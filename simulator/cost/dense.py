"""Dense matrix products by roofline: gate, shared experts, dense layers, LM head. Marked "roofline".

time = max( weight_bytes / (eta * memory_bw), 2 * rows * weights / (mfu * flops) )
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.specs import DTYPE_BYTES, ClusterSpec, ModelSpec

Float = NDArray[np.float64]
DENSE_MFU = 0.65  # of peak, for large dense products (60-70 % on current GPUs)


class GemmRoofline:
    """Microseconds of weight matrices of a given number of elements."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._bytes_per_us = cluster.memory_efficiency * cluster.memory_gbps * 1e3
        self._flops_per_us = DENSE_MFU * cluster.bf16_tflops * 1e6

    def time_us(self, rows: ArrayLike, weights: float, dtype: str = "bf16") -> Float:
        """`rows` rows through matrices of `weights` elements in all; nothing for no rows."""
        rows = np.asarray(rows, dtype=np.float64)
        memory = weights * DTYPE_BYTES[dtype] / self._bytes_per_us
        return np.where(rows > 0, np.maximum(memory, rows * (2.0 * weights / self._flops_per_us)), 0.0)

    def per_row_us(self, k: int, n: int) -> float:
        """Compute time of one row through a [k, n] matrix."""
        return 2.0 * k * n / self._flops_per_us


class DenseCost:
    """The parts of a full model outside MoE layers' routed path, on one rank of `attention_tp` that share the weights."""

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> None:
        self.model, self.gemm, self.tp = model, GemmRoofline(cluster), attention_tp

    def shared_us(self, tokens_G: ArrayLike) -> Float:
        """Shared experts of one MoE layer."""
        model = self.model
        return self._mlp(tokens_G, model.shared_experts * model.shared_ffn)

    def dense_us(self, tokens_G: ArrayLike) -> Float:
        """One dense layer's feed-forward."""
        return self._mlp(tokens_G, self.model.dense_ffn)

    def head_us(self, sequences_G: ArrayLike) -> Float:
        """LM head for the last token of every sequence."""
        return self.gemm.time_us(
            sequences_G, self.model.hidden * self.model.vocab_size / self.tp, self.model.weight_dtype
        )

    def _mlp(self, tokens_G: ArrayLike, ffn: int) -> Float:
        if not ffn:
            return np.zeros(np.shape(tokens_G))
        return self.gemm.time_us(tokens_G, 3.0 * self.model.hidden * ffn / self.tp, self.model.weight_dtype)
