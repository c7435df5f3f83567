"""What a full model adds to its MoE layers, by terms that `semmoe calibrate` measured (names: host.py). Attention-DP only.

attention block = fixed + tokens * a + requests * b + (query, key) pairs of prefills * c + keys that decodes look at * d
LM head, bookkeeping of a step = fixed + requests * e
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from semmoe.specs import ClusterSpec, ModelSpec

from .attention import AttentionLoad

Float = NDArray[np.float64]
FIXED = ("attention.block", "head", "step")
BY_WORK = ("attention.token", "attention.sequence", "attention.pair", "attention.kv", "head", "step")


class WholePass:
    """Microseconds per rank; combine ranks with `slowest`."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.fixed_us = {name: float(cluster.host_us[name]) for name in FIXED}
        self.by_us = {name: float(cluster.per_row_ns[name]) / 1e3 for name in BY_WORK}
        self.mark = "measured" if cluster.provenance.get("host", "").startswith("measured") else "fitted"

    @classmethod
    def of(cls, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> Self | None:
        """The terms, or None where the cluster has none or they are another model's (expert_grid_shape says whose)."""
        known = all(n in cluster.host_us for n in FIXED) and all(n in cluster.per_row_ns for n in BY_WORK)
        same = tuple(cluster.expert_grid_shape) == (model.hidden, model.expert_ffn)
        return cls(cluster) if known and same and attention_tp == 1 else None

    def time_us(self, load: AttentionLoad) -> Float:
        """One attention block; nothing on a rank without tokens."""
        by = self.by_us
        work_us = load.tokens_G * by["attention.token"] + load.sequences_G * by["attention.sequence"]
        work_us += load.prefill_pairs_G * by["attention.pair"] + load.decode_kv_G * by["attention.kv"]
        return np.where(load.tokens_G > 0, self.fixed_us["attention.block"] + work_us, 0.0)

    def around_us(self, load: AttentionLoad) -> Float:
        """LM head and bookkeeping of a step, which an idle rank goes through too."""
        fixed = self.fixed_us["head"] + self.fixed_us["step"]
        return fixed + load.sequences_G * (self.by_us["head"] + self.by_us["step"])
