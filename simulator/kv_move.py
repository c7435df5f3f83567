"""What re-homing requests after their head costs (attention-DP): the KV cache of the head moves once to the new rank.

A move is one message, priced as a KV transfer (kv_link.py). It counts beside the steps, not in them: it can overlap with
the steps of other requests, but the request itself waits for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from semmoe.heads import Heads
from semmoe.run import Run
from semmoe.specs import ClusterSpec, ModelSpec

from .kv_link import KvLink


def kv_move_columns(run: Run, heads: Heads) -> dict[str, float]:
    """Columns kv_moved_bytes (all requests) and kv_move_ms (mean of a request that moves) of a batches workload."""
    bytes_M, ms_M = price_moves(heads.kv_moves_M3, run.model, run.cluster)
    return {"kv_moved_bytes": float(bytes_M.sum()), "kv_move_ms": float(ms_M.mean()) if len(ms_M) else 0.0}


def price_moves(
    moves_M3: NDArray[np.integer], model: ModelSpec, cluster: ClusterSpec
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(bytes, milliseconds) of every move (source rank, destination rank, tokens), each alone on its link.

    Worked example: 64 tokens of qwen3-30b-a3b are 64 * 98,304 bytes = 6.3 MB, 10 us + 15.7 us at 400 GB/s.
    """
    link = KvLink(cluster, model, 0, cluster.ranks)
    ms_M = [link.time_ms(int(tokens), int(source), int(target)) for source, target, tokens in moves_M3]
    bytes_M = moves_M3[:, 2].astype(np.float64) * model.kv_bytes_per_token
    return bytes_M, np.array(ms_M, dtype=np.float64)
