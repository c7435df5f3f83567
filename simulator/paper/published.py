"""Figures of the paper (arXiv 2503.04398, ICLR 2026) that its text states, and what they are once recomputed.

Its percentages of Table 2 are (worse baseline / theirs) - 1; `reduction_pct` of the better baseline is the honest one.
"""

from __future__ import annotations

from collections.abc import Sequence

MODELS = ("deepseek-v2-lite", "qwen3-30b-a3b")
COMMUNICATION_SHARE_PCT = 59.2  # "up to", DeepSeek-V2-Lite, 8 devices, SGLang
LAR_GAIN_POINTS = {"deepseek-v2-lite": 37.0, "qwen3-30b-a3b": 43.0}  # Fig. 5a, attention-TP
LAYER_LATENCY_PCT = {"deepseek-v2-lite": -41.8, "qwen3-30b-a3b": -46.6}  # the same layer
DP_LAR_PCT = (15.4, 36.7)  # Fig. 5b, V2-Lite, EP8: over the best baseline and over the other; which is which is unclear
# gain in throughput under SLO, percent: (TTFT, E2E)
SLO_GAIN_PCT = {
    ("deepseek-v2-lite", "vanilla"): (31.0, 221.0),
    ("deepseek-v2-lite", "moetuner"): (32.0, 278.0),
    ("qwen3-30b-a3b", "vanilla"): (98.0, 11.0),
    ("qwen3-30b-a3b", "moetuner"): (35.0, 32.0),
    ("moonlight-16b-a3b", "vanilla"): (12.0, 10.0),  # App. C.2: means over LMSYS, MMLU and ShareGPT
    ("moonlight-16b-a3b", "moetuner"): (22.0, 14.0),
}
# Table 2, milliseconds: (SGLang, MoETuner, Sem-MoE)
TTFT_P99_MS = {
    ("deepseek-v2-lite", 256): (84.87, 80.96, 75.63),
    ("deepseek-v2-lite", 512): (98.10, 92.17, 88.69),
    ("deepseek-v2-lite", 1024): (111.19, 119.76, 100.74),
    ("qwen3-30b-a3b", 256): (85.72, 87.24, 74.46),
    ("qwen3-30b-a3b", 512): (104.76, 101.86, 83.87),
    ("qwen3-30b-a3b", 1024): (107.73, 107.36, 103.69),
}
E2E_P50_MS = {
    ("deepseek-v2-lite", 256): (617.87, 604.46, 603.10),
    ("deepseek-v2-lite", 512): (609.81, 602.02, 599.89),
    ("deepseek-v2-lite", 1024): (608.96, 606.54, 604.45),
    ("qwen3-30b-a3b", 256): (758.60, 763.97, 750.26),
    ("qwen3-30b-a3b", 512): (766.80, 759.41, 759.16),
    ("qwen3-30b-a3b", 1024): (769.83, 764.16, 762.30),
}
TTFT_CLAIM_PCT = {
    ("deepseek-v2-lite", 256): 12.21,
    ("deepseek-v2-lite", 512): 10.60,
    ("deepseek-v2-lite", 1024): 18.89,
    ("qwen3-30b-a3b", 256): 17.16,
    ("qwen3-30b-a3b", 512): 24.90,
    ("qwen3-30b-a3b", 1024): 3.80,
}
# LAR p50, percent: (model, fitted on) -> evaluated on ShareGPT, LMSYS, MMLU
TRANSFER_PCT = {
    ("deepseek-v2-lite", "sharegpt"): (46.49, 41.25, 41.55),
    ("deepseek-v2-lite", "lmsys"): (40.68, 47.19, 41.40),
    ("qwen3-30b-a3b", "sharegpt"): (46.88, 39.28, 35.30),
    ("qwen3-30b-a3b", "lmsys"): (36.57, 43.61, 33.37),
}
# Table 1, V2-Lite on ShareGPT, by layer: quartiles of the F1 of a token's static hottest k experts, of the share of its
# assignments that they take, and of the largest share of an expert outside of them
TABLE_1 = {
    1: ((1.0, 1.0, 1.0), (0.833, 1.0, 1.0), (0.0, 0.042, 0.071)),
    6: ((0.833, 1.0, 1.0), (0.767, 0.917, 1.0), (0.0, 0.056, 0.083)),
    11: ((0.833, 1.0, 1.0), (0.722, 0.889, 1.0), (0.0, 0.056, 0.083)),
    16: ((0.667, 0.833, 1.0), (0.708, 0.889, 1.0), (0.0, 0.053, 0.083)),
    21: ((0.667, 0.833, 1.0), (0.667, 0.833, 1.0), (0.0, 0.05, 0.074)),
    26: ((0.667, 0.833, 1.0), (0.667, 0.833, 1.0), (0.0, 0.051, 0.083)),
}


def reduction_pct(ours: float, baselines: Sequence[float]) -> float:
    """(better baseline - ours) / better baseline, percent."""
    return 100 * (1 - ours / min(baselines))


def paper_pct(ours: float, baselines: Sequence[float]) -> float:
    """The paper's way: worse baseline / ours - 1, percent."""
    return 100 * (max(baselines) / ours - 1)
