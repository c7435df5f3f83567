"""The head of a request in attention-DP: its first tokens run where round robin put it and show which experts it uses.

The request scheduler then places it for good; the rest of its tokens run there, and the KV cache of its head moves once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class Heads:
    """rank_R: where the scheduler put each request of `trace`; head_tokens: length of a head (0: requests stay).

    Worked example: 2 ranks, heads of 2 tokens, requests of 3, 3 and 2 tokens with rank_R [1, 1, 1]. They arrive at 0, 1
    and 0; homes are [0, 0, 1, 1, 1, 1, 0, 0]; request 0 moves two tokens of KV from 0 to 1, request 2 ended in its head.
    """

    trace: RoutingTrace
    rank_R: NDArray[np.int64]
    ep_size: int
    head_tokens: int

    @property
    def arrival_R(self) -> NDArray[np.int64]:
        """Rank where a request's head runs."""
        return np.arange(self.trace.num_requests) % self.ep_size

    @cached_property
    def inside_T(self) -> NDArray[np.bool_]:
        """Whether a token belongs to the head of its request."""
        place_T = np.arange(self.trace.num_tokens) - self.trace.request_offset_R1[self.trace.request_T]
        return np.asarray(place_T < self.head_tokens)

    @cached_property
    def home_T(self) -> NDArray[np.int64]:
        """Rank of every token."""
        request_T = self.trace.request_T
        return np.where(self.inside_T, self.arrival_R[request_T], self.rank_R[request_T])

    @cached_property
    def kv_moves_M3(self) -> NDArray[np.int64]:
        """(source rank, destination rank, tokens) of every request that goes on elsewhere behind its head."""
        if not self.head_tokens:
            return np.zeros((0, 3), dtype=np.int64)
        length_R = self.trace.length_R
        moves = np.stack([self.arrival_R, self.rank_R, np.minimum(self.head_tokens, length_R)], axis=1)
        return moves[(length_R > self.head_tokens) & (self.arrival_R != self.rank_R)]
