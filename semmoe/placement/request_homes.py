"""Attention-DP's placement of all layers: one home a training request, shared by the layers, against experts per layer.

Homes: the exact capped assignment of requests by the assignments that each rank would serve at home, summed over
layers. Experts: per layer, given the homes. In turn until nothing improves, from a given start.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped, narrowed
from .exchange import best_experts, exchange, value


def request_home_scores(counts_LRE: NDArray[np.integer], holds_LEG: NDArray[np.bool_]) -> NDArray[np.int64]:
    """score_RG: assignments of request r that rank g can serve, summed over layers."""
    score = np.zeros((counts_LRE.shape[1], holds_LEG.shape[2]), dtype=np.float64)
    for counts_RE, holds_EG in zip(counts_LRE, holds_LEG, strict=True):
        score += counts_RE.astype(np.float64) @ holds_EG.astype(np.float64)
    return score.astype(np.int64)


def request_homes(counts_LRE: NDArray[np.integer], holds_LEG: NDArray[np.bool_], capacity: int) -> NDArray[np.int64]:
    """home_R [R], at most `capacity` requests a rank."""
    return assign_capped(narrowed(request_home_scores(counts_LRE, holds_LEG)), capacity)


def local_counts_EG(counts_RE: NDArray[np.integer], home_R: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """local_EG: assignments to e from requests at home g."""
    home_RG = (home_R[:, None] == np.arange(ranks)).astype(np.float64)
    return (counts_RE.T.astype(np.float64) @ home_RG).astype(np.int64)


def one_hot(rank_LE: NDArray[np.integer], ranks: int) -> NDArray[np.bool_]:
    return np.asarray(rank_LE[..., None] == np.arange(ranks))


def alternate_requests(
    counts_LRE: NDArray[np.integer],
    load_LFE: NDArray[np.floating],
    home_R: NDArray[np.integer],
    ranks: int,
    capacity: int,
    weight: float,
    target: float,
    iterations: int,
) -> tuple[float, NDArray[np.int64]]:
    """(mean J over layers, rank_LE), starting from homes."""
    layers, _, experts = counts_LRE.shape
    best_value, best_rank = -np.inf, np.zeros((layers, experts), dtype=np.int64)
    rank_LE: NDArray[np.int64] | None = None
    for _ in range(iterations):
        rows = []
        for layer in range(layers):
            local_EG = local_counts_EG(counts_LRE[layer], home_R, ranks)
            fresh = best_experts(local_EG, load_LFE[layer], weight, target)
            if rank_LE is not None:
                kept = rank_LE[layer].copy()
                exchange(local_EG, load_LFE[layer], kept, weight, target)
                if value(local_EG, load_LFE[layer], kept, weight, target) >= value(
                    local_EG, load_LFE[layer], fresh, weight, target
                ):
                    fresh = kept
            rows.append(fresh)
        rank_LE = np.stack(rows)
        home_R = request_homes(counts_LRE, one_hot(rank_LE, ranks), capacity)
        now = float(
            np.mean(
                [
                    value(
                        local_counts_EG(counts_LRE[layer], home_R, ranks),
                        load_LFE[layer],
                        rank_LE[layer],
                        weight,
                        target,
                    )
                    for layer in range(layers)
                ]
            )
        )
        if now <= best_value + 1e-9:
            break
        best_value, best_rank = now, rank_LE
    return best_value, best_rank
