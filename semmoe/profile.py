"""Profile: statistics of the training part of a trace, counted when first asked for.

Token types are the U distinct token ids of the training part, in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from .trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class Profile:
    """Counts over `trace` (the training part). Nothing of the held-out part ever enters."""

    trace: RoutingTrace

    @classmethod
    def fit(cls, trace: RoutingTrace) -> Profile:
        return cls(trace)

    @property
    def num_experts(self) -> int:
        return self.trace.num_experts

    @property
    def num_layers(self) -> int:
        return self.trace.num_layers

    @cached_property
    def token_ids_U(self) -> NDArray[np.int32]:
        return np.unique(self.trace.token_id_T)

    @cached_property
    def type_T(self) -> NDArray[np.int64]:
        """Index into token_ids_U of every training token."""
        return np.searchsorted(self.token_ids_U, self.trace.token_id_T)

    @cached_property
    def token_count_U(self) -> NDArray[np.int64]:
        return np.bincount(self.type_T, minlength=len(self.token_ids_U))

    @cached_property
    def load_LE(self) -> NDArray[np.int64]:
        """Assignments per expert."""
        one_T = np.zeros(self.trace.num_tokens, dtype=np.int64)
        return np.asarray(count_all(one_T, self.trace.experts_TLk, 1, self.num_experts)[0], dtype=np.int64)

    def token_counts_UE(self, layer: int) -> NDArray[np.int32]:
        """How often token type u activated expert e in MoE layer index `layer`: the paper's table T (section 3.2)."""
        return count_by_row(self.type_T, self.trace.experts_TLk[:, layer], len(self.token_ids_U), self.num_experts)

    def request_counts_RE(self, layer: int) -> NDArray[np.int32]:
        """Histogram of activated experts of every training request."""
        return count_by_row(
            self.trace.request_T, self.trace.experts_TLk[:, layer], self.trace.num_requests, self.num_experts
        )

    def request_counts_LRE(self) -> NDArray[np.int32]:
        """request_counts_RE of all layers, counted in one pass."""
        counts = count_all(self.trace.request_T, self.trace.experts_TLk, self.trace.num_requests, self.num_experts)
        return np.ascontiguousarray(counts.transpose(1, 0, 2))

    def transitions_EE(self, layer: int, lookback: int = 1) -> NDArray[np.int64]:
        """Pairs (expert in layer - lookback, expert in layer) of the same token."""
        if layer < lookback:
            raise IndexError(f"layer {layer} has no layer {lookback} before it")
        return count_pairs(
            self.trace.experts_TLk[:, layer - lookback], self.trace.experts_TLk[:, layer], self.num_experts
        )

    def coactivation_EE(self, layer: int) -> NDArray[np.int64]:
        """Pairs of experts activated together by a token; the diagonal holds the loads."""
        experts_Tk = self.trace.experts_TLk[:, layer]
        return count_pairs(experts_Tk, experts_Tk, self.num_experts)

    @lru_cache(maxsize=8)  # noqa: B019 - profiles are few and live as long as the run
    def folds(self, count: int, seed: int = 0) -> list[tuple[RoutingTrace, RoutingTrace]]:
        """`count` (fit, validate) pairs by request, for planned figures that are not in-sample."""
        requests = self.trace.num_requests
        count = min(count, requests)
        fold_R = np.random.default_rng(seed).permutation(np.arange(requests) % count)
        return (
            [
                (self.trace.select(np.flatnonzero(fold_R != f)), self.trace.select(np.flatnonzero(fold_R == f)))
                for f in range(count)
            ]
            if count > 1
            else [(self.trace, self.trace)]
        )


@numba.njit(cache=True)
def count_all(row_T, experts_TLk, rows, num_experts):  # type: ignore[no-untyped-def]
    """counts[row_T[t], l, e] over all choices e of token t in layer l."""
    tokens, layers, k = experts_TLk.shape
    counts = np.zeros((rows, layers, num_experts), dtype=np.int32)
    for t in range(tokens):
        for layer in range(layers):
            for j in range(k):
                counts[row_T[t], layer, experts_TLk[t, layer, j]] += 1
    return counts


@numba.njit(cache=True, nogil=True)
def count_by_row(row_T, experts_Tk, rows, num_experts):  # type: ignore[no-untyped-def]
    """counts[row_T[t], e] over all choices e of token t."""
    counts = np.zeros((rows, num_experts), dtype=np.int32)
    for t in range(experts_Tk.shape[0]):
        row = row_T[t]
        for j in range(experts_Tk.shape[1]):
            counts[row, experts_Tk[t, j]] += 1
    return counts


@numba.njit(cache=True)
def count_pairs(first_Tk, second_Tk, num_experts):  # type: ignore[no-untyped-def]
    """pairs[e, f] = tokens for which e is among the first choices and f among the second."""
    pairs = np.zeros((num_experts, num_experts), dtype=np.int64)
    for t in range(first_Tk.shape[0]):
        for i in range(first_Tk.shape[1]):
            for j in range(second_Tk.shape[1]):
                pairs[first_Tk[t, i], second_Tk[t, j]] += 1
    return pairs
