"""ServingLoop: continuous batching as one pure state machine, without a clock of its own.

`submit(request, now_ms)`, `next_step(now_ms) -> StepPlan | wake_at_ms | None`, `complete(step, duration_ms, finished)`.
The simulator drives it with predicted durations, the harness with measured ones. In attention-DP there is one queue a
rank and all ranks step together (idle ranks hold no entry); in attention-TP one queue feeds all ranks (`queues = 1`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .schedule.base import RankStates, RequestScheduler, assign_all

PREFILL, DECODE = 0, 1


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
        if not (np.isfinite(self.arrival_ms) and self.arrival_ms >= 0):
            raise UserError(f"request {self.id}: arrival_ms={self.arrival_ms} must be finite and not negative")

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


@dataclass(eq=False)
class _Queue:
    waiting: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)


class ServingLoop:
    """Continuous batching with chunked prefill, a KV budget and preemption by recomputation (youngest first).

    scheduler: request scheduler, used when there is more than one queue; score_of(request) -> score_G or None;
    head_of(request) -> measured head counts_LE or None.
    Requests that arrived since the last step are assigned together when the next step is formed.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        queues: int,
        limits: ServingLimits,
        scheduler: RequestScheduler | None = None,
        score_of: Callable[[Request], NDArray[np.int64] | None] | None = None,
        head_of: Callable[[Request], NDArray[np.int64] | None] | None = None,
    ) -> None:
        if queues > 1 and scheduler is None:
            raise UserError(f"{queues} queues need a request scheduler")
        self.requests = list(requests)
        for position, request in enumerate(self.requests):
            if request.id != position:
                raise UserError(
                    f"requests must be numbered 0..{len(self.requests) - 1}; position {position} holds {request.id}"
                )
            if request.prompt_len + request.output_len > limits.kv_tokens:
                raise UserError(
                    f"request {request.id} needs {request.prompt_len + request.output_len} KV tokens; a rank has "
                    f"{limits.kv_tokens} (raise serving.kv_tokens or shorten it)"
                )
        self.limits, self.scheduler, self.score_of, self.head_of = limits, scheduler, score_of, head_of
        self.queues = [_Queue() for _ in range(queues)]
        count = len(self.requests)
        self.prompt_R = np.array([r.prompt_len for r in self.requests], dtype=np.int64)
        self.output_R = np.array([r.output_len for r in self.requests], dtype=np.int64)
        self.tokens = TokenRows.of(self.requests)
        self.arrival_ms_R = np.array([r.arrival_ms for r in self.requests], dtype=np.float64)
        self.rank_R = np.full(count, -1, dtype=np.int64)
        self.computed_R = np.zeros(count, dtype=np.int64)  # tokens in the KV cache
        self.produced_R = np.zeros(count, dtype=np.int64)  # output tokens sampled
        self.first_token_ms_R = np.full(count, np.nan)
        self.last_token_ms_R = np.full(count, np.nan)
        self.finish_ms_R = np.full(count, np.nan)
        self.kv_used_G = np.zeros(queues, dtype=np.int64)
        self.preemptions = 0
        self.steps = 0
        self._gaps_ms: list[NDArray[np.float64]] = []
        self._pending: list[int] = []
        self._in_flight: StepPlan | None = None
        self._now_ms = self._step_start_ms = 0.0
        self._unfinished = count
        self._submitted = np.zeros(count, dtype=bool)

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, those that have not arrived included."""
        return self._unfinished

    def itl_ms(self) -> NDArray[np.float64]:
        """Inter-token latencies so far: time between one output token of a request and its next, all requests."""
        return np.concatenate(self._gaps_ms) if self._gaps_ms else np.zeros(0)

    def submit(self, request: Request, now_ms: float) -> None:
        """Hand in a request; it takes part from the next step on."""
        if self._submitted[request.id]:
            raise UserError(f"request {request.id} was submitted twice")
        self._submitted[request.id] = True
        self._now_ms = max(self._now_ms, now_ms)
        self._pending.append(request.id)

    def rank_states(self) -> RankStates:
        """What a request scheduler sees."""
        queued = [
            int(self._left(np.array([*queue.waiting, *queue.running], dtype=np.int64)).sum()) for queue in self.queues
        ]
        return RankStates(
            np.array(queued, dtype=np.int64),
            np.array([len(q.running) for q in self.queues], dtype=np.int64),
            np.array([len(q.waiting) for q in self.queues], dtype=np.int64),
            self.kv_used_G.copy(),
            self.limits.kv_tokens,
        )

    def next_step(self, now_ms: float) -> StepPlan | float | None:
        """The next StepPlan; or the time of the next arrival when nothing can run; or None when nothing will ever."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.index} is still in flight; complete it first")
        self._now_ms = max(self._now_ms, now_ms)
        self._assign_pending()
        parts: list[NDArray[np.int64]] = []
        for rank, queue in enumerate(self.queues):
            parts += self._plan_queue(rank, queue)
        if not parts:
            future = self.arrival_ms_R[~self._submitted]
            return float(future.min()) if len(future) else None
        self._in_flight = StepPlan(self.steps, *np.concatenate(parts, axis=1))
        self._step_start_ms = self._now_ms
        self.steps += 1
        return self._in_flight

    def complete(self, step: StepPlan, duration_ms: float, finished: Iterable[int] = ()) -> None:
        """The step took duration_ms. `finished`: requests that ended early (end-of-sequence seen by a real model)."""
        if self._in_flight is not step:
            raise RuntimeError(f"step {step.index} is not in flight")
        if not duration_ms >= 0:
            raise ValueError(f"duration_ms={duration_ms} must be a number >= 0")
        self._in_flight = None
        self._now_ms = max(self._now_ms, self._step_start_ms + duration_ms)  # requests may have arrived meanwhile
        ids, early = step.request_N, set(finished)
        self.computed_R[ids] += step.count_N
        np.add.at(self.kv_used_G, step.rank_N, step.count_N)
        sampled = ids[self.computed_R[ids] >= self.prompt_R[ids] + self.produced_R[ids]]
        self.produced_R[sampled] += 1
        gaps_ms = self._now_ms - self.last_token_ms_R[sampled]
        self._gaps_ms.append(gaps_ms[~np.isnan(gaps_ms)])
        self.last_token_ms_R[sampled] = self._now_ms
        new = sampled[np.isnan(self.first_token_ms_R[sampled])]
        self.first_token_ms_R[new] = self._now_ms
        over = sampled[self.produced_R[sampled] >= self.output_R[sampled]].tolist()
        for request in over + [r for r in early if r not in over and r in sampled]:
            self._release(request)
            self.finish_ms_R[request] = self._now_ms
            self._unfinished -= 1

    def _prefill_left(self, request: int) -> int:
        return int(max(self.prompt_R[request] + self.produced_R[request] - self.computed_R[request], 0))

    def _left(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each request has yet to compute before its next output token."""
        return np.maximum(self.prompt_R[ids] + self.produced_R[ids] - self.computed_R[ids], 0)

    def _release(self, request: int) -> None:
        rank = int(self.rank_R[request])
        self.queues[rank].running.remove(request)
        self.kv_used_G[rank] -= self.computed_R[request]

    def _assign_pending(self) -> None:
        if not self._pending:
            return
        pending = [self.requests[r] for r in self._pending]
        self._pending = []
        if len(self.queues) == 1:
            ranks = [0] * len(pending)
        else:
            assert self.scheduler is not None
            scores = [self.score_of(request) for request in pending] if self.score_of else []
            stacked = np.stack([s for s in scores if s is not None]) if scores and scores[0] is not None else None
            heads = [self.head_of(request) for request in pending] if self.head_of else []
            known = [h for h in heads if h is not None] if heads and heads[0] is not None else None
            ranks = assign_all(self.scheduler, pending, stacked, self.rank_states(), known)
        for request, rank in zip(pending, ranks, strict=True):
            self.rank_R[request.id] = rank
            self.queues[rank].waiting.append(request.id)

    def _plan_queue(self, rank: int, queue: _Queue) -> list[NDArray[np.int64]]:
        """Entries of one queue, [5, n] arrays of (rank, request, phase, start, count): decode, started prompts, new."""
        budget, kv_free = self.limits.max_batch_tokens, int(self.limits.kv_tokens - self.kv_used_G[rank])
        running = np.array(queue.running, dtype=np.int64)
        decodes = (self._left(running) == 1) & (self.produced_R[running] > 0)
        while decodes.sum() > kv_free:
            victim = queue.running[-1]
            kv_free += int(self.computed_R[victim])
            self._preempt(rank, queue, victim)
            running, decodes = running[:-1], decodes[:-1]
        decoding = running[decodes]
        kv_free -= len(decoding)
        decoding = decoding[:budget]
        budget -= len(decoding)
        prefill: list[tuple[int, int]] = []
        for request in running[~decodes].tolist():
            left = self._prefill_left(request)
            count = max(min(left, budget, kv_free), 0)
            if count > 0:
                prefill.append((request, count))
                budget -= count
            kv_free -= left  # the rest of a started prompt stays reserved against new ones
        while queue.waiting and budget > 0 and len(queue.running) < self.limits.max_running:
            request = queue.waiting[0]
            left = self._prefill_left(request)
            if left + 1 > kv_free:
                break
            queue.waiting.popleft()
            queue.running.append(request)
            count = min(left, budget)
            prefill.append((request, count))
            budget -= count
            kv_free -= left
        parts = []
        if len(decoding):
            parts.append(self._entries(rank, decoding, DECODE, np.ones_like(decoding)))
        if prefill:
            ids, counts = np.array(prefill, dtype=np.int64).T
            parts.append(self._entries(rank, ids, PREFILL, counts))
        if not parts and len(queue.running) > 1:
            self._preempt(rank, queue, queue.running[-1])  # started prompts block each other: restart the youngest
            return self._plan_queue(rank, queue)
        return parts

    def _entries(self, rank: int, ids: NDArray[np.int64], phase: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        entries = np.empty((5, len(ids)), dtype=np.int64)
        entries[0], entries[1], entries[2], entries[3], entries[4] = rank, ids, phase, self.computed_R[ids], counts
        return entries

    def _preempt(self, rank: int, queue: _Queue, victim: int) -> None:
        """Give back all KV of the youngest running request; prompt and output will be recomputed."""
        queue.running.remove(victim)
        queue.waiting.appendleft(victim)
        self.kv_used_G[rank] -= self.computed_R[victim]
        self.computed_R[victim] = 0
        self.preemptions += 1
