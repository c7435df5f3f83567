"""What a full model adds to its MoE layers, by terms that `semmoe calibrate` measured (names: host.py).

attention block = fixed + tokens * a + requests * b + (query, key) pairs of prefills * c + keys that decodes look at * d
LM head, bookkeeping of a step = fixed + requests * e

In tp flows the block is that of a share of the heads, and every rank has the LM head and the bookkeeping of all requests.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from semmoe.specs import ClusterSpec, ModelSpec

from .attention import AttentionLoad

Float = NDArray[np.float64]
PARTS = ("block", "token", "sequence", "pair", "kv")
AROUND = ("head", "step")


class WholePass:
    """Microseconds per rank; combine ranks with `slowest`. attention_tp: ranks that share the heads."""

    def __init__(self, cluster: ClusterSpec, attention_tp: int) -> None:
        block, *by_work = _attention_terms(attention_tp)
        self._block_us, self._by_work_us = cluster.host_us[block], [cluster.per_row_ns[n] / 1e3 for n in by_work]
        self._around_us = sum(cluster.host_us[n] for n in AROUND)
        self._by_request_us = sum(cluster.per_row_ns[n] / 1e3 for n in AROUND)
        self.mark = "measured" if cluster.provenance.get("host", "").startswith("measured") else "fitted"

    @classmethod
    def of(cls, cluster: ClusterSpec, model: ModelSpec, attention_tp: int) -> Self | None:
        """The terms, or None where the cluster has none for so many ranks or they are another model's (expert_grid_shape
        says whose)."""
        block, *by_work = _attention_terms(attention_tp)
        known = {block, *AROUND} <= cluster.host_us.keys() and {*by_work, *AROUND} <= cluster.per_row_ns.keys()
        same = tuple(cluster.expert_grid_shape) == (model.hidden, model.expert_ffn)
        return cls(cluster, attention_tp) if known and same else None

    def time_us(self, load: AttentionLoad) -> Float:
        """One attention block; nothing on a rank without tokens."""
        works = (load.tokens_G, load.sequences_G, load.prefill_pairs_G, load.decode_kv_G)
        terms_us = [by_us * work for by_us, work in zip(self._by_work_us, works, strict=True)]
        return np.where(load.tokens_G > 0, self._block_us + np.sum(terms_us, axis=0), 0.0)

    def around_us(self, load: AttentionLoad) -> Float:
        """LM head and bookkeeping of a step, which an idle rank goes through too."""
        return self._around_us + load.sequences_G * self._by_request_us


def _attention_terms(attention_tp: int) -> list[str]:
    end = f".tp{attention_tp}" if attention_tp > 1 else ""
    return [f"attention.{part}{end}" for part in PARTS]
