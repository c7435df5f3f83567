"""KvLink: how long the KV cache of a finished prompt takes from the rank that prefilled it to the rank that decodes.

    bytes = prompt tokens * KV bytes a token over all layers
    time  = curve_2(2 * bytes), the measured exchange of two ranks, or alpha + bytes / bandwidth; between nodes
            nic_alpha + bytes / nic_gbps

The prefill ranks are the first of the cluster, the decode ranks those that follow. A rank sends one transfer at a time and
receives one at a time, in the order in which they were asked for. The whole prompt is sent when it is finished (no overlap
with its own prefill).
"""

from __future__ import annotations

import numpy as np

from semmoe.specs import ClusterSpec, ModelSpec

from .cost.curves import CurveSet


class KvLink:
    """prefill, decode: ranks of the two pools."""

    def __init__(self, cluster: ClusterSpec, model: ModelSpec, prefill: int, decode: int) -> None:
        self.cluster, self.bytes_per_token = cluster, model.kv_bytes_per_token
        self.prefill = prefill
        self._curve = CurveSet(cluster.curves).exact(("alltoall",), 2)
        self._sends_until_ms, self._receives_until_ms = np.zeros(prefill), np.zeros(decode)
        self.bytes_sent = 0.0
        self.durations_ms: list[float] = []

    def time_ms(self, tokens: int, source: int, target: int) -> float:
        """One transfer alone on its links. source: prefill rank; target: decode rank."""
        size, cluster = tokens * self.bytes_per_token, self.cluster
        if source // cluster.ranks_per_node != (self.prefill + target) // cluster.ranks_per_node:
            return (cluster.nic_alpha_us + size / (cluster.nic_gbps * 1e3)) / 1e3
        if self._curve is not None:
            return float(self._curve.time_us(2 * size)) / 1e3
        return (cluster.alpha_us + size / (cluster.link_gbps * 1e3)) / 1e3

    def send(self, tokens: int, source: int, target: int, now_ms: float) -> float:
        """Start (or queue) a transfer now; when it will be over."""
        begin_ms = max(now_ms, self._sends_until_ms[source], self._receives_until_ms[target])
        end_ms = begin_ms + self.time_ms(tokens, source, target)
        self._sends_until_ms[source] = self._receives_until_ms[target] = end_ms
        self.bytes_sent += tokens * self.bytes_per_token
        self.durations_ms.append(float(end_ms - now_ms))
        return float(end_ms)
