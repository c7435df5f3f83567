"""Priced homes: what a device works out in one kernel. Ranks that too many tokens ask for get dearer, then repair by margin.

    maximise   sum over t of score[t, home(t)]      at most `capacity` tokens a rank

    prices     32 rounds: home = argmax over g of score[t, g] - price[g]; price[g] += step * (count[g] - capacity), not
               below 0; step starts at 2 * spread / T and halves every 4 rounds. The prices of the round with the lowest
               dual value, sum_t max_g (score - price) + capacity * sum_g price, are kept.
    repair     while a rank is overfull: its tokens of least margin to their best rank with room move there

Tokens are cut into chunks of `chunk_tokens(G)`, each a program of its own with its share of the capacity. All is integer
arithmetic with ties to the lower rank, then the lower token: `harness.kernels.home` gives the same homes to the last token.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .base import Plan

ROUNDS, HALVE_EVERY = 32, 4
CHUNK_ELEMENTS = 8192  # scores that a program of the kernel holds in registers
MOST_SPREAD = 1 << 24  # prices stay below 16 times that: 2^28, well within int32


class Priced:
    """Homes by rank prices in whole chunks of tokens, repaired by margin: the device's own algorithm, near the exact one.

    Within 1.1 % of `semantic`'s summed score on random, skewed, clustered and tied scores; in integers, so that simulator
    and device agree.
    """

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan:
        return Plan.from_owner(priced_owners(score_TG, capacity), score_TG.shape[1])


def chunk_tokens(ranks: int) -> int:
    """Tokens of a full chunk: a multiple of `ranks`, so that equal shares of the capacity always suffice."""
    padded = 1 << max((ranks - 1).bit_length(), 1)
    return max(CHUNK_ELEMENTS // padded // ranks, 1) * ranks


def chunk_capacity(start: int, end: int, tokens: int, ranks: int, capacity: int) -> int:
    """Tokens that a rank may take of the chunk start..end-1: its equal share, and its part of the slack."""
    slack = capacity - -(-tokens // ranks)
    return -(-(end - start) // ranks) + slack * end // tokens - slack * start // tokens


def priced_owners(score_TG: NDArray[np.int32], capacity: int) -> NDArray[np.int64]:
    """Home of each token. UserError when the tokens do not fit, or scores span 2^24 or more (256 assignments)."""
    tokens, ranks = score_TG.shape
    check_priced(tokens, ranks, capacity)
    if tokens and int(score_TG.max()) - int(score_TG.min()) >= MOST_SPREAD:
        raise UserError(f"scores span {int(score_TG.max()) - int(score_TG.min())}; token scheduler priced takes < 2^24")
    owner_T = np.empty(tokens, dtype=np.int64)
    chunk = chunk_tokens(ranks)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        most = chunk_capacity(start, end, tokens, ranks, capacity)
        value_TG = _priced_values(score_TG[start:end].astype(np.int64), most)
        owner_T[start:end] = _repaired(value_TG, most)
    return owner_T


def check_priced(tokens: int, ranks: int, capacity: int) -> None:
    if capacity * ranks < tokens:
        raise UserError(f"{tokens} tokens on {ranks} ranks do not fit a capacity of {capacity} tokens a rank")


@numba.njit(cache=True)
def _priced_values(score_TG, capacity):  # type: ignore[no-untyped-def]
    """score - price of the best round."""
    tokens, ranks = score_TG.shape
    price_G = np.zeros(ranks, dtype=np.int64)
    best_G = price_G.copy()
    step = max(2 * (score_TG.max() - score_TG.min()) // tokens, 1)
    best_dual = np.int64(1) << 62
    for turn in range(ROUNDS):
        count_G = np.zeros(ranks, dtype=np.int64)
        dual = capacity * price_G.sum()
        for t in range(tokens):
            home = 0
            for g in range(1, ranks):
                if score_TG[t, g] - price_G[g] > score_TG[t, home] - price_G[home]:
                    home = g
            count_G[home] += 1
            dual += score_TG[t, home] - price_G[home]
        if dual < best_dual:
            best_dual, best_G = dual, price_G.copy()
        price_G = np.maximum(price_G + step * (count_G - capacity), 0)
        if turn % HALVE_EVERY == HALVE_EVERY - 1:
            step = max(step // 2, 1)
    return score_TG - best_G


def _repaired(value_TG: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Argmax of the values, overfull ranks relieved one after the other; every pass ends one or fills another."""
    tokens, ranks = value_TG.shape
    token_T = np.arange(tokens)
    owner_T = value_TG.argmax(axis=1)
    count_G = np.bincount(owner_T, minlength=ranks)
    while (count_G > capacity).any():
        source = int(np.argmax(count_G > capacity))
        open_TG = np.where(count_G < capacity, value_TG, np.iinfo(np.int64).min // 2)
        target_T = open_TG.argmax(axis=1)
        margin_T = value_TG[token_T, owner_T] - open_TG[token_T, target_T]
        mine = np.flatnonzero(owner_T == source)
        leaving = mine[np.argsort(margin_T[mine], kind="stable")][: count_G[source] - capacity]
        for target in np.flatnonzero(count_G < capacity):
            moved = leaving[target_T[leaving] == target][: capacity - count_G[target]]
            owner_T[moved] = target
            count_G[target] += len(moved)
            count_G[source] -= len(moved)
    return owner_T
