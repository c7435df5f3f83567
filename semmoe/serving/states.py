"""RequestStates: what a serving loop knows of every request, as arrays over all R of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .stepplan import Request, TokenRows


class RequestStates:
    """requests, numbered 0..R-1, and where each stands: rank_R its queue (-1: none yet), computed_R tokens in its KV
    cache, produced_R output tokens sampled, hit_tokens_R prompt tokens found in the cache when it first started (-1: it
    has not), loading_R whether its KV is on the way from another loop, remote_R whether it lies there and has not been
    asked for. Times in ms; NaN: not reached."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        count = len(self.requests)
        for position, request in enumerate(self.requests):
            if request.id != position:
                raise UserError(f"requests must be numbered 0..{count - 1}; position {position} holds {request.id}")
        self.prompt_R = np.array([r.prompt_len for r in self.requests], dtype=np.int64)
        self.output_R = np.array([r.output_len for r in self.requests], dtype=np.int64)
        self.tokens = TokenRows.of(self.requests)
        self.arrival_ms_R = np.array([r.arrival_ms for r in self.requests], dtype=np.float64)
        self.rank_R = np.full(count, -1, dtype=np.int64)
        self.computed_R = np.zeros(count, dtype=np.int64)
        self.produced_R = np.zeros(count, dtype=np.int64)
        self.hit_tokens_R = np.full(count, -1, dtype=np.int64)
        self.loading_R = np.zeros(count, dtype=bool)
        self.remote_R = np.zeros(count, dtype=bool)
        self.first_token_ms_R = np.full(count, np.nan)
        self.last_token_ms_R = np.full(count, np.nan)
        self.finish_ms_R = np.full(count, np.nan)

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens that were in the cache when their request first started, over all prompt tokens started."""
        started = self.hit_tokens_R >= 0
        total = int(self.prompt_R[started].sum())
        return float(self.hit_tokens_R[started].sum()) / total if total else 0.0

    def left(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each of these requests has yet to compute before its next output token."""
        return np.maximum(self.prompt_R[ids] + self.produced_R[ids] - self.computed_R[ids], 0)

    def left_of(self, request: int) -> int:
        """The same of one request."""
        return int(max(self.prompt_R[request] + self.produced_R[request] - self.computed_R[request], 0))

    def decode(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these running requests have their KV here and only their last output token to compute."""
        made = self.produced_R[ids]
        ready = self.prompt_R[ids] + made == self.computed_R[ids] + 1
        return ready & (made > 0) & ~self.loading_R[ids]
