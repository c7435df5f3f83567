"""LocalityMeter: LAR, fan-out, imbalance and bytes of many steps, in the words of DESIGN section 2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .traffic import Collective, Traffic


class LocalityMeter:
    """Accumulates Traffic over steps and yields the locality columns of a result row (words of DESIGN section 2)."""

    def __init__(self, num_layers: int, ep_size: int, ranks_per_node: int | None = None) -> None:
        self.ranks_per_node = ranks_per_node or ep_size
        self.assignment_pairs_LGG = np.zeros((num_layers, ep_size, ep_size), dtype=np.int64)
        self.rank_pairs_LGG = np.zeros((num_layers, ep_size, ep_size), dtype=np.int64)
        self.homes_LG = np.zeros((num_layers, ep_size), dtype=np.int64)
        self.rows_LG = np.zeros((num_layers, ep_size), dtype=np.int64)
        self.bytes_by_op: dict[str, float] = {}
        self.node_bytes = self.nic_bytes = self.metadata_bytes = 0.0
        self.tokens = self.steps = 0
        self._imbalance_sum = self._active_sum = 0.0
        self._counted = 0

    def add(self, traffic: Traffic) -> None:
        self.assignment_pairs_LGG += traffic.assignment_pairs_LGG
        self.rank_pairs_LGG += traffic.rank_pairs_LGG
        self.homes_LG += traffic.homes_LG
        self.rows_LG += traffic.expert_rows_LG
        self.tokens += traffic.tokens
        self.steps += 1
        mean_L = traffic.expert_rows_LG.mean(axis=1)
        busy = mean_L > 0
        self._imbalance_sum += float((traffic.expert_rows_LG.max(axis=1)[busy] / mean_L[busy]).sum())
        self._active_sum += float(traffic.active_experts_LG.max(axis=1)[busy].sum())
        self._counted += int(busy.sum())
        self.metadata_bytes += traffic.metadata_bytes
        for c in traffic.collectives:
            total = float(c.remote_bytes_L(traffic.ep_size).sum())
            across = self._nic_share(c, traffic) if self.ranks_per_node < traffic.ep_size else 0.0
            self.bytes_by_op[c.op] = self.bytes_by_op.get(c.op, 0.0) + total
            self.nic_bytes += across
            self.node_bytes += total - across

    def _nic_share(self, c: Collective, traffic: Traffic) -> float:
        if c.rows_LGG is None:
            nodes = traffic.ep_size // self.ranks_per_node
            return float(c.remote_bytes_L(traffic.ep_size).sum()) * (nodes - 1) / max(traffic.ep_size - 1, 1)
        node_G = np.arange(traffic.ep_size) // self.ranks_per_node
        return float(c.rows_LGG[:, node_G[:, None] != node_G[None, :]].sum() * c.row_bytes)

    def lar_per_layer_L(self) -> NDArray[np.float64]:
        total_L = self.assignment_pairs_LGG.sum(axis=(1, 2))
        local_L = np.trace(self.assignment_pairs_LGG, axis1=1, axis2=2)
        return np.divide(local_L, total_L, out=np.full(len(total_L), np.nan), where=total_L > 0)

    def fan_out_per_layer_L(self) -> NDArray[np.float64]:
        remote_L = self.rank_pairs_LGG.sum(axis=(1, 2)) - np.trace(self.rank_pairs_LGG, axis1=1, axis2=2)
        tokens_L = self.homes_LG.sum(axis=1)
        return np.divide(remote_L, tokens_L, out=np.full(len(tokens_L), np.nan), where=tokens_L > 0)

    def columns(self) -> dict[str, float]:
        """lar, fan_out, imbalance_step / _total, home_imbalance, active_experts, bytes per tier and operation."""
        rows_mean = self.rows_LG.mean(axis=1)
        homes_mean = self.homes_LG.mean(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.where(rows_mean > 0, self.rows_LG.max(axis=1) / rows_mean, np.nan)
            home = np.where(homes_mean > 0, self.homes_LG.max(axis=1) / homes_mean, np.nan)
        counted = max(self._counted, 1)
        return {
            "lar": _mean(self.lar_per_layer_L()),
            "fan_out": _mean(self.fan_out_per_layer_L()),
            "imbalance_step": self._imbalance_sum / counted if self._counted else float("nan"),
            "imbalance_total": _mean(total),
            "home_imbalance": _mean(home),
            "active_experts": self._active_sum / counted if self._counted else float("nan"),
            "node_bytes": self.node_bytes,
            "nic_bytes": self.nic_bytes,
            "metadata_bytes": self.metadata_bytes,
            **{f"{op}_bytes": value for op, value in sorted(self.bytes_by_op.items())},
        }


def _mean(values: NDArray[np.float64]) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))
