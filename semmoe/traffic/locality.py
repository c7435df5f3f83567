"""LocalityMeter: LAR, fan-out, imbalance and bytes of many steps, in the words of DESIGN section 2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .collective import Collective
from .over_ranks import most, total
from .traffic import Traffic
from .wiring import Wiring


class LocalityMeter:
    """Accumulates Traffic over steps and yields the locality columns of a result row (words of DESIGN section 2).

    wiring: of the group, by default one node. Bytes count once on every tier that they cross: what is relayed inside a
    node after it came from another counts there too, and `node_bytes + nic_bytes` is the sum over operations.
    """

    def __init__(self, num_layers: int, ep_size: int, wiring: Wiring | None = None) -> None:
        self.wiring = wiring or Wiring.plain(ep_size)
        pairs = 0 if self.wiring.wide else ep_size
        self.assignment_pairs_LGG = np.zeros((num_layers, pairs, pairs), dtype=np.int64)
        self.rank_pairs_LGG = np.zeros((num_layers, pairs, pairs), dtype=np.int64)
        self._assignments_L, self._local_L, self._remote_pairs_L = (np.zeros(num_layers, np.int64) for _ in range(3))
        self.homes_LG = np.zeros((num_layers, ep_size), dtype=np.int64)
        self.rows_LG = np.zeros((num_layers, ep_size), dtype=np.int64)
        self.bytes_by_op: dict[str, float] = {}
        self.node_bytes = self.nic_bytes = self.spine_bytes = self.metadata_bytes = 0.0
        self.tokens = self.steps = 0
        self._active_sum = 0.0
        self._imbalance_sum_L = np.zeros(num_layers)
        self._counted_L = np.zeros(num_layers, dtype=np.int64)

    def add(self, traffic: Traffic, steps: int = 1) -> None:
        """Count a step, or several, whose layers follow each other in the traffic."""

        def over_steps(values: NDArray[Any]) -> NDArray[Any]:
            return (
                values if steps == 1 else values.reshape(steps, -1, *values.shape[1:]).sum(axis=0, dtype=values.dtype)
            )

        # sums are not in place: expected traffic has fractions
        if self.wiring.wide:
            self._assignments_L = self._assignments_L + over_steps(traffic.assignments_L())
            self._local_L = self._local_L + over_steps(traffic.local_assignments_L())
            self._remote_pairs_L = self._remote_pairs_L + over_steps(traffic.remote_rank_pairs_L())
        else:
            self.assignment_pairs_LGG = self.assignment_pairs_LGG + over_steps(traffic.assignment_pairs_LGG)
            self.rank_pairs_LGG = self.rank_pairs_LGG + over_steps(traffic.rank_pairs_LGG)
        self.homes_LG = self.homes_LG + over_steps(traffic.homes_LG)
        self.rows_LG = self.rows_LG + over_steps(traffic.expert_rows_LG)
        self.tokens += traffic.tokens
        self.steps += steps
        mean_L = total(traffic.expert_rows_LG) / traffic.ep_size
        busy = mean_L > 0
        most_L = most(traffic.expert_rows_LG)
        self._imbalance_sum_L += over_steps(np.divide(most_L, mean_L, out=np.zeros(len(mean_L)), where=busy))
        self._active_sum += float(most(traffic.active_experts_LG)[busy].sum())
        self._counted_L += over_steps(busy.astype(np.int64))
        self.metadata_bytes += traffic.metadata_bytes
        for c in traffic.collectives:
            node, nic, spine = self._tier_bytes(c)
            self.bytes_by_op[c.op] = self.bytes_by_op.get(c.op, 0.0) + node + nic
            self.node_bytes += node
            self.nic_bytes += nic
            self.spine_bytes += spine

    def _tier_bytes(self, c: Collective) -> tuple[float, float, float]:
        """Payload bytes inside nodes, between nodes, and of these through the spine."""
        wiring = self.wiring
        if wiring.nodes == 1:
            return float(c.remote_bytes_L(wiring.ranks).sum()), 0.0, 0.0
        if c.buffer_rows_L is not None:  # reduce-scatter in every node, all-reduce of the shares, all-gather
            buffer = 2.0 * float(c.buffer_rows_L.sum()) * c.row_bytes
            parts = (wiring.ranks - wiring.nodes, wiring.nodes - 1, wiring.leaf_groups - 1)
            return buffer * parts[0], buffer * parts[1], buffer * parts[2]
        ports = c.ports(wiring)
        rows = (ports.node_rows_L.sum(), ports.nic_rows_L.sum(), ports.spine_rows_L.sum())
        return float(rows[0]) * c.row_bytes, float(rows[1]) * c.row_bytes, float(rows[2]) * c.row_bytes

    def lar_per_layer_L(self) -> NDArray[np.float64]:
        total_L = self._assignments_L + self.assignment_pairs_LGG.sum(axis=(1, 2))
        local_L = self._local_L + np.trace(self.assignment_pairs_LGG, axis1=1, axis2=2)
        return np.divide(local_L, total_L, out=np.full(len(total_L), np.nan), where=total_L > 0)

    def fan_out_per_layer_L(self) -> NDArray[np.float64]:
        remote_L = self.rank_pairs_LGG.sum(axis=(1, 2)) - np.trace(self.rank_pairs_LGG, axis1=1, axis2=2)
        remote_L = remote_L + self._remote_pairs_L
        tokens_L = self.homes_LG.sum(axis=1)
        return np.divide(remote_L, tokens_L, out=np.full(len(tokens_L), np.nan), where=tokens_L > 0)

    def imbalance_per_layer_L(self) -> NDArray[np.float64]:
        """Mean over steps of max/mean expert rows a rank."""
        counted_L = self._counted_L
        return np.divide(self._imbalance_sum_L, counted_L, out=np.full(len(counted_L), np.nan), where=counted_L > 0)

    def columns(self) -> dict[str, float]:
        """lar, fan_out, imbalance_step / _total, home_imbalance, active_experts, bytes per tier and operation."""
        rows_mean = self.rows_LG.mean(axis=1)
        homes_mean = self.homes_LG.mean(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.where(rows_mean > 0, self.rows_LG.max(axis=1) / rows_mean, np.nan)
            home = np.where(homes_mean > 0, self.homes_LG.max(axis=1) / homes_mean, np.nan)
        counted = int(self._counted_L.sum())
        return {
            "lar": _mean(self.lar_per_layer_L()),
            "fan_out": _mean(self.fan_out_per_layer_L()),
            "imbalance_step": float(self._imbalance_sum_L.sum()) / counted if counted else float("nan"),
            "imbalance_total": _mean(total),
            "home_imbalance": _mean(home),
            "active_experts": self._active_sum / counted if counted else float("nan"),
            "node_bytes": self.node_bytes,
            "nic_bytes": self.nic_bytes,
            "spine_bytes": self.spine_bytes,
            "metadata_bytes": self.metadata_bytes,
            **{f"{op}_bytes": value for op, value in sorted(self.bytes_by_op.items())},
        }


def _mean(values: NDArray[np.float64]) -> float:
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))
