"""Measured tables of one-sided low-latency dispatch and combine (DeepEP), keyed by tokens per rank.

A table was measured with even routing: each of its tokens sends top_k * (ranks - 1) / ranks rows away. A batch is
looked up at the number of tokens whose rows carry the bytes of its busiest port, so that other widths, other top-k and
locality scale the bytes and keep the floor. Dispatched rows of the table are fp8 with a scale per block, combined bf16.
Worked example, hidden 2048, top-8, 8 ranks: a token sends 7 rows of 2112 bytes; a port with 1,892,352 bytes is 128 tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import FP8_BLOCK
from semmoe.errors import UserError
from semmoe.specs import ClusterSpec, Curve

from .curves import LatencyCurve

Float = NDArray[np.float64]
KEYS = ("ranks", "hidden", "top_k", "num_experts", "tokens_per_rank", "dispatch_us", "combine_us")


class LowLatencyTable:
    """One table of cluster.deepep["low_latency"]; lists of tokens_per_rank, dispatch_us and combine_us."""

    marks = frozenset({"interpolated"})

    def __init__(self, raw: dict[str, object], where: str) -> None:
        missing = [key for key in KEYS if key not in raw]
        if missing:
            raise UserError(f"cluster {where}: deepep.low_latency lacks {', '.join(missing)}")
        hidden, ranks = int(raw["hidden"]), int(raw["ranks"])  # type: ignore[call-overload]
        rows = float(raw["top_k"]) * (ranks - 1) / ranks  # type: ignore[arg-type]
        fp8_row = hidden + -(-hidden // FP8_BLOCK) * 4
        self.token_bytes = {"dispatch": rows * fp8_row, "combine": rows * hidden * 2}
        tokens: tuple[float, ...] = tuple(raw["tokens_per_rank"])  # type: ignore[arg-type]
        self._curve = {
            op: LatencyCurve(Curve(op=op, ranks=ranks, bytes=tokens, latency_us=tuple(raw[f"{op}_us"])))  # type: ignore[arg-type]
            for op in ("dispatch", "combine")
        }

    @classmethod
    def of(cls, cluster: ClusterSpec, ranks: int) -> LowLatencyTable | None:
        """The cluster's table for this many ranks, or None."""
        raw = cluster.deepep.get("low_latency")
        return cls(raw, cluster.name) if raw and int(raw.get("ranks", 0)) == ranks else None

    def time_us(self, op: str, port_bytes: Float, nic_bytes: Float, row_bytes: float, tokens_L: Float) -> Float:
        """Microseconds of "dispatch" or "combine" whose busiest port sends or receives these bytes (deepep.NormalMode
        asks for the rest)."""
        return self._curve[op].time_us(port_bytes / self.token_bytes[op])
