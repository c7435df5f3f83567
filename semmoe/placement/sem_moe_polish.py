"""The objective of sem_moe.py, and exchanges that bring a pair of request and expert clusters near its optimum."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from ..assign import assign_equal


@numba.njit(cache=True)
def objective(mass_LRE, length_R, rank_LE, home_R, ranks, theta):  # type: ignore[no-untyped-def]
    """theta * sum_c |tokens_c / S - 1/G| + (1 - theta) * share of expected activations that are remote."""
    token_G = np.zeros(ranks)
    local, total = 0.0, 0.0
    for r in range(len(home_R)):
        token_G[home_R[r]] += length_R[r]
        for layer in range(mass_LRE.shape[0]):
            for e in range(mass_LRE.shape[2]):
                total += mass_LRE[layer, r, e]
                if rank_LE[layer, e] == home_R[r]:
                    local += mass_LRE[layer, r, e]
    uneven = np.abs(token_G / token_G.sum() - 1.0 / ranks).sum()
    return theta * uneven + (1.0 - theta) * (1.0 - local / max(total, 1e-12))


def best_experts(mass_LRE: NDArray[np.float64], home_R: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """rank_LE: the experts with the most mass at home for these homes (exact, equally many a rank)."""
    home_RG = (home_R[:, None] == np.arange(ranks)).astype(np.float64)
    return np.stack([assign_equal(np.rint(mass_RE.T @ home_RG * 1024).astype(np.int64)) for mass_RE in mass_LRE])


def polished(
    mass_LRE: NDArray[np.float64],
    length_R: NDArray[np.float64],
    rank_LE: NDArray[np.int64],
    home_R: NDArray[np.int64],
    ranks: int,
    theta: float,
) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
    """The pair after exchanges of requests and exact experts in turn, until the objective stops falling."""
    value = objective(mass_LRE, length_R, rank_LE, home_R, ranks, theta)
    while True:
        rank_LEG = (rank_LE[:, :, None] == np.arange(ranks)).astype(np.float64)
        score_RG = np.einsum("lre,leg->rg", mass_LRE, rank_LEG, optimize=True) / mass_LRE.sum()
        fresh_R = home_R.copy()
        trade_requests(score_RG, length_R / length_R.sum(), fresh_R, theta)
        fresh_LE = best_experts(mass_LRE, fresh_R, ranks)
        now = objective(mass_LRE, length_R, fresh_LE, fresh_R, ranks, theta)
        if now >= value - 1e-9:
            return float(value), rank_LE, home_R
        value, rank_LE, home_R = now, fresh_LE, fresh_R


@numba.njit(cache=True)
def trade_requests(score_RG, share_R, home_R, theta):  # type: ignore[no-untyped-def]
    """Move requests, or trade two, while theta * unevenness - (1 - theta) * local share falls (home_R in place)."""
    requests, ranks = score_RG.shape
    quota = -(-requests // ranks)
    load_G, count_G = np.full(ranks, -1.0 / ranks), np.zeros(ranks, dtype=np.int64)
    for r in range(requests):
        load_G[home_R[r]] += share_R[r]
        count_G[home_R[r]] += 1
    improved = True
    while improved:
        improved = False
        for a in range(requests):
            partner, to, best = -1, -1, 1e-9
            g = home_R[a]
            for b in range(requests + ranks):  # a request to trade with, or a rank to move to
                h = home_R[b] if b < requests else b - requests
                if h == g or (b >= requests and count_G[h] >= quota):
                    continue
                shift = share_R[a] - (share_R[b] if b < requests else 0.0)
                gain = score_RG[a, h] - score_RG[a, g]
                if b < requests:
                    gain += score_RG[b, g] - score_RG[b, h]
                uneven = abs(load_G[g] - shift) + abs(load_G[h] + shift) - abs(load_G[g]) - abs(load_G[h])
                now = (1.0 - theta) * gain - theta * uneven
                if now > best:
                    partner, to, best = b, h, now
            if to < 0:
                continue
            shift = share_R[a]
            if partner < requests:
                shift -= share_R[partner]
                home_R[partner] = g
            else:
                count_G[g] -= 1
                count_G[to] += 1
            home_R[a] = to
            load_G[g] -= shift
            load_G[to] += shift
            improved = True
