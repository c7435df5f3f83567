"""What a serving loop works with: requests, limits of a queue, and the plan of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

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


@dataclass(frozen=True, eq=False)
class Stretch:
    """Steps that follow each other while nothing arrives. After the `first` all requests decode, one token a step, until
    they end: `rest` is these steps as one plan, whose entry i decodes count_N[i] tokens from position start_N[i] on.

    Worked example: a prompt of 8 tokens with 3 output tokens beside a request that has 2 output tokens to go. first: 8
    tokens and 1; rest: counts 2 and 1, so the steps after the first hold 2 tokens and 1.
    """

    first: StepPlan
    rest: StepPlan

    @property
    def steps(self) -> int:
        return 1 + int(self.rest.count_N.max(initial=0))

    @cached_property
    def later_T(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(entry of `rest`, step from 1 on) of every token after the first step."""
        count_N = self.rest.count_N
        entry_T = np.repeat(np.arange(len(count_N)), count_N)
        return entry_T, 1 + np.arange(len(entry_T)) - (np.cumsum(count_N) - count_N)[entry_T]

    def tokens_SG(self, queues: int) -> NDArray[np.int64]:
        """Tokens of every step on every queue."""
        entry_T, step_T = self.later_T
        tokens_SG = np.bincount(step_T * queues + self.rest.rank_N[entry_T], minlength=self.steps * queues)
        tokens_SG[:queues] = np.bincount(self.first.rank_N, weights=self.first.count_N, minlength=queues)
        return tokens_SG.reshape(-1, queues)

    def token_rows(self, tokens: TokenRows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(trace row, queue, step from 0 on) of every token."""
        (row_T, queue_T), (later_row_T, later_queue_T) = self.first.token_rows(tokens), self.rest.token_rows(tokens)
        step_T = np.concatenate([np.zeros(len(row_T), np.int64), self.later_T[1]])
        return np.concatenate([row_T, later_row_T]), np.concatenate([queue_T, later_queue_T]), step_T

    def plans(self, steps: int) -> Iterator[StepPlan]:
        """The plans of the first `steps`."""
        yield self.first
        rest = self.rest
        for later in range(steps - 1):
            goes_on = rest.count_N > later
            rank_N, request_N, phase_N, start_N = (
                column_N[goes_on] for column_N in (rest.rank_N, rest.request_N, rest.phase_N, rest.start_N)
            )
            yield StepPlan(rest.index + later, rank_N, request_N, phase_N, start_N + later, np.ones_like(start_N))
