"""Dense matrix products: gate, attention projections, shared experts, dense layers, LM head.

    time = products * floor + max( weight_bytes / (efficiency * memory_bw), 2 * rows * weights / (mfu * flops) )

`ClusterSpec.gemm` holds efficiency, mfu (of the BF16 peak) and floor_us as fitted to measured products (`fit_gemm`); without
it the law is a roofline without floor, marked so. Worked example, H200 as fitted (4 us, .80, .78): 16 rows through a
[4096, 4096] matrix of BF16 take 4 + 33.6 MB / 3,840 GB/s = 12.7 us.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.specs import DTYPE_BYTES, ClusterSpec, ModelSpec

Float = NDArray[np.float64]
DENSE_MFU = 0.65  # of peak, for large dense products (60-70 % on current GPUs)


class GemmLaw:
    """Microseconds of weight matrices of a given number of elements."""

    def __init__(self, cluster: ClusterSpec) -> None:
        terms = {"efficiency": cluster.memory_efficiency, "mfu": DENSE_MFU, "floor_us": 0.0} | cluster.gemm
        self.mark = "fitted" if cluster.gemm else "roofline"
        self.floor_us = terms["floor_us"]
        self._bytes_per_us = terms["efficiency"] * cluster.memory_gbps * 1e3
        self._flops_per_us = terms["mfu"] * cluster.bf16_tflops * 1e6

    def time_us(self, rows: ArrayLike, weights: float, dtype: str = "bf16", products: int = 1) -> Float:
        """`rows` rows through matrices of `weights` elements in all, in that many kernels; nothing for no rows."""
        rows = np.asarray(rows, dtype=np.float64)
        memory = weights * DTYPE_BYTES[dtype] / self._bytes_per_us
        work = np.maximum(memory, rows * (2.0 * weights / self._flops_per_us))
        return np.where(rows > 0, products * self.floor_us + work, 0.0)

    def per_row_us(self, k: int, n: int) -> float:
        """Compute time of one row through a [k, n] matrix."""
        return 2.0 * k * n / self._flops_per_us


def fit_gemm(points_N3: Float, memory_gbps: float, bf16_tflops: float, weight_bytes: float) -> dict[str, float]:
    """`ClusterSpec.gemm` from (rows, weights, us) of measured products: robust least squares of the relative error."""
    from scipy.optimize import least_squares

    rows, weights, us = np.asarray(points_N3, dtype=np.float64).T
    memory_us, compute_us = weights * weight_bytes / (memory_gbps * 1e3), 2 * rows * weights / (bf16_tflops * 1e6)

    def error(x: Float) -> Float:
        return np.asarray(np.log((np.exp(x[0]) + np.maximum(memory_us / x[1], compute_us / x[2])) / us))

    bounds = ((-3.0, 0.2, 0.05), (4.0, 1.1, 4.0))  # of FP8 products the share of the BF16 peak may pass 2
    floor, efficiency, mfu = least_squares(error, (1.0, 0.8, 0.7), bounds=bounds, loss="soft_l1").x
    return {"efficiency": float(efficiency), "mfu": float(mfu), "floor_us": float(np.exp(floor))}


class DenseCost:
    """The parts of a full model outside MoE layers' routed path, on one rank of `attention_tp` that share the weights."""

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> None:
        self.model, self.gemm, self.tp = model, GemmLaw(cluster), attention_tp

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
        weights = 3.0 * self.model.hidden * ffn / self.tp
        return self.gemm.time_us(tokens_G, weights, self.model.weight_dtype, products=2)  # gate and up are one
