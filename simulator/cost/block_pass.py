"""What blocks add to the MoE layers of fixed batches, by terms that `semmoe calibrate` measured on this model.

    host_us / per_row_ns, each name followed by the model's, and where G ranks share the weights by ".tpG":
    blocks.attention   fixed part of an attention block;  blocks.token, blocks.sequence, blocks.pair, blocks.kv: of its work
    blocks.dense, blocks.shared    one dense layer, the shared experts of one MoE layer: fixed + rows
    blocks.head                    final norm and LM head: fixed + sequences

dp: whole weights on every rank, its own tokens. tp flows: shares, all tokens; but where tokens have a home (tp_scattered,
tp_shuffled) shared experts stand whole on every rank and see a share of the tokens.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semmoe.specs import ClusterSpec, ModelSpec

from .attention import AttentionLoad

Float = NDArray[np.float64]
BY_WORK = ("token", "sequence", "pair", "kv")


class BlockPass:
    """Microseconds per rank; combine ranks with `slowest`. mark: word of provenance."""

    mark = "measured"

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, flow: str, ranks: int) -> None:
        self._host_us, self._row_ns = cluster.host_us, cluster.per_row_ns
        self._whole = f".{model.name}"
        self._end = self._whole if flow == "dp" or ranks == 1 else f"{self._whole}.tp{ranks}"
        self._homes = ranks if flow in ("tp_scattered", "tp_shuffled") else 0

    @classmethod
    def of(cls, cluster: ClusterSpec, model: ModelSpec, flow: str, ranks: int) -> Self | None:
        """The terms; None where this model was not measured with so many ranks (expert_grid_shape tells its scale)."""
        made = cls(cluster, model, flow, ranks)
        same = tuple(cluster.expert_grid_shape) == (model.hidden, model.expert_ffn)
        return made if same and f"blocks.attention{made._end}" in cluster.host_us else None

    def time_us(self, load: AttentionLoad) -> Float:
        """One attention block; nothing on a rank without tokens."""
        works = (load.tokens_G, load.sequences_G, load.prefill_pairs_G, load.decode_kv_G)
        fixed_us = self._host_us[f"blocks.attention{self._end}"]
        terms_us = [self._row_ns[f"blocks.{n}{self._end}"] / 1e3 * work for n, work in zip(BY_WORK, works, strict=True)]
        return np.where(load.tokens_G > 0, fixed_us + np.sum(terms_us, axis=0), 0.0)

    def shared_us(self, tokens_G: ArrayLike) -> Float:
        rows = np.asarray(tokens_G, dtype=np.float64)
        if self._homes:
            return self._rows(f"blocks.shared{self._whole}", np.ceil(rows / self._homes))
        return self._rows(f"blocks.shared{self._end}", rows)

    def dense_us(self, tokens_G: ArrayLike) -> Float:
        return self._rows(f"blocks.dense{self._end}", np.asarray(tokens_G, dtype=np.float64))

    def head_us(self, sequences_G: ArrayLike) -> Float:
        return self._rows(f"blocks.head{self._end}", np.asarray(sequences_G, dtype=np.float64))

    def _rows(self, name: str, rows: Float) -> Float:
        if name not in self._host_us:
            return np.zeros_like(rows)
        return np.where(rows > 0, self._host_us[name] + rows * self._row_ns[name] / 1e3, 0.0)
