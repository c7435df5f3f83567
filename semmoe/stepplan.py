"""What a serving loop works with: requests, limits of a queue, and the plan of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import UserError

PREFILL, DECODE = 0, 1


LATEST_MS = 1e13  # 300 years: a float64 still tells 2 us apart there


@dataclass(frozen=True)
class Request:
    """One request. Its routes are rows token_start : token_start + prompt_len + output_len - 1 of the workload's
    trace: the last output token is sampled but never fed back. token_period > 0: the rows repeat after so many.

    prefix_ids: one id per KV block of the prompt, from its start, equal where prompts are declared equal so far.
    """

    id: int
    arrival_ms: float
    prompt_len: int
    output_len: int
    token_start: int = 0
    token_period: int = 0
    prefix_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise UserError(
                f"request {self.id}: prompt_len={self.prompt_len} and output_len={self.output_len} must be >= 1"
            )
        if not 0 <= self.arrival_ms <= LATEST_MS:
            raise UserError(
                f"request {self.id}: arrival_ms={self.arrival_ms} must be in 0..{LATEST_MS:g}; a later clock loses the steps"
            )

    def rows(self, count: int) -> NDArray[np.int64]:
        """Trace rows of its first `count` tokens."""
        position = np.arange(count)
        return self.token_start + (position % self.token_period if self.token_period else position)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Where the routes of every request lie in the trace: see Request. period_R is None where none repeats."""

    start_R: NDArray[np.int64]
    period_R: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> TokenRows:
        start_R, period_R = (
            np.array([getattr(r, n) for r in requests], np.int64) for n in ("token_start", "token_period")
        )
        return cls(start_R, np.where(period_R, period_R, np.iinfo(np.int64).max) if period_R.any() else None)


@dataclass(frozen=True)
class ServingLimits:
    """Limits of a queue: tokens a step (chunked prefill fills what decode leaves), running requests, KV tokens.

    prefix_block_tokens: tokens of a block of the prefix cache, what one id of Request.prefix_ids stands for; 0: no cache.
    """

    max_batch_tokens: int = 2048
    max_running: int = 256
    kv_tokens: int = 1 << 20
    prefix_block_tokens: int = 512

    def __post_init__(self) -> None:
        if self.prefix_block_tokens < 0:
            raise UserError(f"serving.prefix_block_tokens={self.prefix_block_tokens} must be at least 0")
        for name in ("max_batch_tokens", "max_running", "kv_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"serving.{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One forward pass. Entry i: request_N[i] on queue rank_N[i] computes count_N[i] tokens from position start_N[i];
    phase_N[i] is PREFILL or DECODE. After it, the entry's KV length is start + count."""

    index: int
    rank_N: NDArray[np.int64]
    request_N: NDArray[np.int64]
    phase_N: NDArray[np.int64]
    start_N: NDArray[np.int64]
    count_N: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return int(self.count_N.sum())

    @property
    def kv_len_N(self) -> NDArray[np.int64]:
        return self.start_N + self.count_N

    def later(self, steps: int) -> StepPlan:
        """The same entries so many decode steps later."""
        later_N = self.start_N + steps
        return StepPlan(self.index + steps, self.rank_N, self.request_N, self.phase_N, later_N, self.count_N)

    def token_rows(self, tokens: TokenRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(trace row, queue) of every token of the step, in entry order."""
        total = self.num_tokens
        first = np.cumsum(self.count_N) - self.count_N
        begin_N, queue_T = tokens.start_R[self.request_N], np.repeat(self.rank_N, self.count_N)
        if tokens.period_R is None:
            return np.repeat(begin_N + self.start_N - first, self.count_N) + np.arange(total), queue_T
        position_T = np.repeat(self.start_N - first, self.count_N) + np.arange(total)
        period_T = np.repeat(tokens.period_R[self.request_N], self.count_N)
        return np.repeat(begin_N, self.count_N) + position_T % period_T, queue_T
