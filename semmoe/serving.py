"""ServingLoop: continuous batching as one pure state machine, without a clock of its own.

`submit(request, now_ms)`, `next_step(now_ms) -> StepPlan | wake_at_ms | None`, `complete(step, duration_ms, finished)`.
The simulator drives it with predicted durations, the harness with measured ones. In attention-DP there is one queue a
rank and all ranks step together (idle ranks hold no entry); in attention-TP one queue feeds all ranks (`queues = 1`).

Prefill-decode disaggregation is two loops. The one that prefills holds a finished prompt's KV (`hold_kv`) until
`free(request)`. The one that decodes gets requests with `submit(..., first_token_ms)`; as soon as it has room for the KV of
one, it names it in `fetches()`, and the request decodes once `fetched(request)` says that the KV is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .kv_store import KvStore
from .schedule.base import RankStates, RequestScheduler, assign_all
from .stepplan import DECODE, PREFILL, Request, ServingLimits, StepPlan, Stretch, TokenRows

__all__ = ["DECODE", "PREFILL", "Request", "ServingLimits", "ServingLoop", "StepPlan", "Stretch", "TokenRows"]


Known = Callable[[Request], NDArray[np.int64] | None]  # of a request: see ServingLoop
_Entries = tuple[int, NDArray[np.int64], int, NDArray[np.int64]]  # rank, requests, phase, token counts


@dataclass(eq=False)
class _Queue:
    waiting: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Steady:
    """A step in which every running request decodes and none waits: the next one is the same, one position on."""

    rank_N: NDArray[np.int64]
    request_N: NDArray[np.int64]
    phase_N: NDArray[np.int64]
    count_N: NDArray[np.int64]
    count_G: NDArray[np.int64]


class ServingLoop:
    """Continuous batching with chunked prefill, a KV budget, prefix-cache hits and preemption by recomputation (youngest
    first).

    scheduler: request scheduler, used when there is more than one queue; score_of(request) -> score_G or None;
    head_of(request) -> measured head counts_LE or None.
    Requests that arrived since the last step are assigned together when the next step is formed. kv: see kv_store.py.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        queues: int,
        limits: ServingLimits,
        scheduler: RequestScheduler | None = None,
        score_of: Known | None = None,
        head_of: Known | None = None,
        hold_kv: bool = False,
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
        self.hold_kv = hold_kv
        self.queues = [_Queue() for _ in range(queues)]
        self.kv = KvStore(self.requests, queues, limits)
        count = len(self.requests)
        self.prompt_R = np.array([r.prompt_len for r in self.requests], dtype=np.int64)
        self.output_R = np.array([r.output_len for r in self.requests], dtype=np.int64)
        self.tokens = TokenRows.of(self.requests)
        self.arrival_ms_R = np.array([r.arrival_ms for r in self.requests], dtype=np.float64)
        self.rank_R = np.full(count, -1, dtype=np.int64)
        self.computed_R = np.zeros(count, dtype=np.int64)  # tokens in the KV cache
        self.produced_R = np.zeros(count, dtype=np.int64)  # output tokens sampled
        self.hit_tokens_R = np.full(count, -1, dtype=np.int64)  # prompt tokens found in the cache at the first start
        self.first_token_ms_R = np.full(count, np.nan)
        self.last_token_ms_R = np.full(count, np.nan)
        self.finish_ms_R = np.full(count, np.nan)
        self.preemptions = 0
        self.steps = 0
        self._loading_R = np.zeros(count, dtype=bool)  # admitted, its KV still on the way from another loop
        self._remote_R = np.zeros(count, dtype=bool)  # its KV lies in another loop and has not been asked for
        self._fetches: list[int] = []
        self._gaps_ms: list[NDArray[np.float64]] = []
        self._pending: list[int] = []
        self._steady: _Steady | None = None
        self._in_flight: StepPlan | None = None
        self._now_ms = self._step_start_ms = 0.0
        self._unfinished = count
        self._submitted = np.zeros(count, dtype=bool)
        self._arrival_order_R = np.argsort(self.arrival_ms_R, kind="stable")
        self._arrived = 0  # first of that order that was not submitted

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, those that have not arrived included."""
        return self._unfinished

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens that were in the cache when their request first started, over all prompt tokens started."""
        started = self.hit_tokens_R >= 0
        total = int(self.prompt_R[started].sum())
        return float(self.hit_tokens_R[started].sum()) / total if total else 0.0

    def itl_ms(self) -> NDArray[np.float64]:
        """Inter-token latencies so far: time between one output token of a request and its next, all requests."""
        return np.concatenate(self._gaps_ms) if self._gaps_ms else np.zeros(0)

    def submit(self, request: Request, now_ms: float, first_token_ms: float | None = None) -> None:
        """Hand in a request; it takes part from the next step on. first_token_ms: another loop computed its prompt, whose
        KV has to be fetched, and gave its first token then."""
        if self._submitted[request.id]:
            raise UserError(f"request {request.id} was submitted twice")
        self._submitted[request.id] = True
        self._now_ms = max(self._now_ms, now_ms)
        self._pending.append(request.id)
        if first_token_ms is not None:
            self._remote_R[request.id] = True
            self.produced_R[request.id] = 1
            self.first_token_ms_R[request.id] = self.last_token_ms_R[request.id] = first_token_ms

    def fetches(self) -> list[int]:
        """Requests whose KV has room here since the last call and should be sent now."""
        wanted, self._fetches = self._fetches, []
        return wanted

    def fetched(self, request: int) -> None:
        """The KV of a request from `fetches` has arrived."""
        self._loading_R[request] = False
        self._steady = None

    def free(self, request: int) -> None:
        """Give back the KV of a finished request that was held (`hold_kv`)."""
        self._free_kv(request)

    def reschedule(self, score_of: Known, head_of: Known) -> None:
        """Requests get their queues by these from now on, those that wait without KV too; the others stay with theirs.
        The scheduler is the same."""
        self.score_of, self.head_of = score_of, head_of
        if len(self.queues) == 1:
            return
        for queue in self.queues:
            self._pending += [request for request in queue.waiting if not self._remote_R[request]]
            queue.waiting = deque(request for request in queue.waiting if self._remote_R[request])
        self._pending.sort(key=lambda request: (self.arrival_ms_R[request], request))

    def rank_states(self) -> RankStates:
        """What a request scheduler sees."""
        ids = np.array([r for queue in self.queues for r in (*queue.waiting, *queue.running)], dtype=np.int64)
        queued_G = np.bincount(self.rank_R[ids], weights=self._left(ids), minlength=len(self.queues))
        return RankStates(
            queued_G.astype(np.int64),
            np.array([len(q.running) for q in self.queues], dtype=np.int64),
            np.array([len(q.waiting) for q in self.queues], dtype=np.int64),
            self.kv.used_G.copy(),
            self.limits.kv_tokens,
        )

    def next_step(self, now_ms: float) -> StepPlan | float | None:
        """The next StepPlan; or the time of the next arrival when nothing can run; or None when nothing will ever (or
        until KV arrives that `fetches` asked for)."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.index} is still in flight; complete it first")
        self._now_ms = max(self._now_ms, now_ms)
        self._assign_pending()
        steady = self._steady
        if steady is None or (steady.count_G > self.limits.kv_tokens - self.kv.used_G).any():
            plan = self._plan()
            if plan is None:
                arrival_ms = self.next_arrival_ms()
                return arrival_ms if arrival_ms < np.inf else None
            self._in_flight = plan
            self._steady = self._steady_after(self._in_flight)
        else:
            start_N = self.computed_R[steady.request_N]
            self._in_flight = StepPlan(
                self.steps, steady.rank_N, steady.request_N, steady.phase_N, start_N, steady.count_N
            )
        self._step_start_ms = self._now_ms
        self.steps += 1
        return self._in_flight

    def complete(self, step: StepPlan, duration_ms: float, finished: Iterable[int] = ()) -> None:
        """The step took duration_ms. `finished`: requests that ended early (end-of-sequence seen by a real model)."""
        if self._in_flight is not step:
            raise RuntimeError(f"step {step.index} is not in flight")
        if not duration_ms >= 0:
            raise ValueError(f"duration_ms={duration_ms} must be a number >= 0")
        # requests may have arrived meanwhile
        self._finish(step, max(self._now_ms, self._step_start_ms + duration_ms), finished)

    def _finish(self, step: StepPlan, end_ms: float, finished: Iterable[int] = ()) -> None:
        self._in_flight = None
        self._now_ms = max(self._now_ms, end_ms)
        ids, early = step.request_N, set(finished)
        computed_N = step.start_N + step.count_N
        self.computed_R[ids] = computed_N
        used_G = np.bincount(step.rank_N, weights=step.count_N, minlength=len(self.queues))
        self.kv.used_G += used_G.astype(np.int64)
        if self.kv.caching:
            ranks, tokens = self.rank_R[ids].tolist(), computed_N.tolist()
            self.kv.keep_blocks(zip(ranks, [self.requests[r] for r in ids], tokens, strict=True))
        made_N = self.produced_R[ids]
        ready = computed_N >= self.prompt_R[ids] + made_N
        sampled, made_n = (ids, made_N + 1) if ready.all() else (ids[ready], made_N[ready] + 1)
        self.produced_R[sampled] = made_n
        last_ms = self.last_token_ms_R[sampled]
        first = np.isnan(last_ms)
        self._gaps_ms.append(end_ms - last_ms[~first])
        self.last_token_ms_R[sampled] = end_ms
        self.first_token_ms_R[sampled[first]] = end_ms
        over = sampled[made_n >= self.output_R[sampled]].tolist()
        for request in over + [r for r in early if r not in over and r in sampled]:
            self._end(request, end_ms)

    def _end(self, request: int, end_ms: float) -> None:
        self.queues[int(self.rank_R[request])].running.remove(request)
        self._steady = None
        if not self.hold_kv:
            self._free_kv(request)
        self.finish_ms_R[request] = end_ms
        self._unfinished -= 1

    @property
    def pending(self) -> bool:
        """Whether requests arrived since the last step was formed."""
        return bool(self._pending)

    def next_arrival_ms(self) -> float:
        """When the next request arrives that was not submitted yet; infinity: all were."""
        order_R = self._arrival_order_R
        while self._arrived < len(order_R) and self._submitted[order_R[self._arrived]]:
            self._arrived += 1
        return float(self.arrival_ms_R[order_R[self._arrived]]) if self._arrived < len(order_R) else np.inf

    def stretch(self, most: int) -> Stretch:
        """The step in flight and those that follow it unless requests or KV arrive, `most` in all: as long as every
        running request decodes and all of them have room."""
        step = self._in_flight
        assert step is not None
        if most == 1 or self.kv.caching or any(queue.waiting for queue in self.queues):
            return Stretch(step, StepPlan(step.index + 1, *np.zeros((5, 0), dtype=np.int64)))
        ids = np.array([request for queue in self.queues for request in queue.running], dtype=np.int64)
        next_N = self.prompt_R[ids] + self.produced_R[ids]  # computed tokens, once the step is over
        left_N = self.output_R[ids] - self.produced_R[ids] - 1
        if len(ids) != len(step.request_N) or int(next_N.sum()) != int(step.kv_len_N.sum()):
            most = 1  # somebody is not in it, or does not finish its prompt
        rank_N, queues = self.rank_R[ids], len(self.queues)
        free_G = (
            self.limits.kv_tokens - self.kv.used_G - np.bincount(step.rank_N, step.count_N, queues).astype(np.int64)
        )
        room_G = free_G // np.maximum(np.bincount(rank_N[left_N > 0], minlength=queues), 1)
        count_N = np.minimum(left_N, max(min(most - 1, int(room_G.min())), 0))
        kept = count_N > 0
        ids, count_N = ids[kept], count_N[kept]
        phase_N = np.full(len(ids), DECODE, dtype=np.int64)
        return Stretch(step, StepPlan(step.index + 1, rank_N[kept], ids, phase_N, next_N[kept], count_N))

    def complete_stretch(self, stretch: Stretch, end_ms_S: Sequence[float]) -> None:
        """Its first steps took place and ended at these times: as many calls of next_step and complete at once."""
        self._finish(stretch.first, end_ms_S[0])
        later, ids, end_ms = len(end_ms_S) - 1, stretch.rest.request_N, np.asarray(end_ms_S)
        if not later:
            return
        done_N = np.minimum(stretch.rest.count_N, later)
        self.steps += later
        self._now_ms = max(self._now_ms, end_ms_S[-1])
        self.computed_R[ids] += done_N
        self.produced_R[ids] += done_N
        self.kv.used_G += np.bincount(stretch.rest.rank_N, done_N, len(self.queues)).astype(np.int64)
        gaps_ms, step_T = np.diff(end_ms), stretch.later_T[1]
        self._gaps_ms.append(gaps_ms[step_T[step_T <= later] - 1])
        self.last_token_ms_R[ids] = end_ms[done_N]
        over = ids[self.produced_R[ids] >= self.output_R[ids]]
        for request in over[np.argsort(self.last_token_ms_R[over], kind="stable")].tolist():
            self._end(request, self.last_token_ms_R[request])

    def _steady_after(self, plan: StepPlan) -> _Steady | None:
        """The plan as what to repeat, where it holds all that there is to do and all of it decodes."""
        running = sum(len(queue.running) for queue in self.queues)
        if running != len(plan.request_N) or any(queue.waiting for queue in self.queues) or not plan.phase_N.all():
            return None
        count_G = np.bincount(plan.rank_N, minlength=len(self.queues))
        return _Steady(plan.rank_N, plan.request_N, plan.phase_N, plan.count_N, count_G)

    def _prefill_left(self, request: int) -> int:
        return int(max(self.prompt_R[request] + self.produced_R[request] - self.computed_R[request], 0))

    def _left(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each request has yet to compute before its next output token."""
        return np.maximum(self.prompt_R[ids] + self.produced_R[ids] - self.computed_R[ids], 0)

    def _assign_pending(self) -> None:
        if not self._pending:
            return
        self._steady = None
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
            states = self.rank_states()
            if self.kv.caching:
                states = replace(states, prefix_hit_tokens_RG=self.kv.hits_RG(pending))
            ranks = assign_all(self.scheduler, pending, stacked, states, known)
        for request, rank in zip(pending, ranks, strict=True):
            self.rank_R[request.id] = rank
            self.queues[rank].waiting.append(request.id)

    def _plan(self) -> StepPlan | None:
        """Entries of all queues in turn: decodes, prompts that started, new ones. None: there is nothing to do."""
        running = np.array([request for queue in self.queues for request in queue.running], dtype=np.int64)
        decodes = self._decodes(running)
        parts: list[_Entries] = []
        begin = 0
        for rank, queue in enumerate(self.queues):
            mine = slice(begin, begin + len(queue.running))
            begin = mine.stop
            if queue.running or queue.waiting:
                parts += self._plan_queue(rank, queue, running[mine], decodes[mine])
        if not parts:
            return None
        ranks, ids, phases, counts = zip(*parts, strict=True)
        lengths, request_N = [len(part) for part in ids], np.concatenate(ids)
        rank_N, phase_N = np.repeat(ranks, lengths), np.repeat(phases, lengths)
        return StepPlan(self.steps, rank_N, request_N, phase_N, self.computed_R[request_N], np.concatenate(counts))

    def _decodes(self, running: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which running requests have their KV here and only their last output token to compute."""
        made = self.produced_R[running]
        ready = self.prompt_R[running] + made == self.computed_R[running] + 1
        return ready & (made > 0) & ~self._loading_R[running]

    def _plan_queue(
        self, rank: int, queue: _Queue, running: NDArray[np.int64], decodes: NDArray[np.bool_]
    ) -> list[_Entries]:
        """Entries of one queue: decodes, then prompts."""
        budget, kv_free = self.limits.max_batch_tokens, self.kv.free_tokens(rank)
        decoding = running[decodes]
        while len(decoding) > kv_free:
            kv_free += self._preempt(rank, queue, queue.running[-1])
            running, decodes = running[:-1], decodes[:-1]
            decoding = running[decodes]
        kv_free -= len(decoding)
        started = running[~decodes & ~self._loading_R[running]].tolist() if len(decoding) < len(running) else []
        decoding = decoding[:budget]
        budget -= len(decoding)
        prefill: list[tuple[int, int]] = []
        for request in started:
            left = self._prefill_left(request)
            count = max(min(left, budget, kv_free), 0)
            if count > 0:
                prefill.append((request, count))
                budget -= count
            kv_free -= left  # the rest of a started prompt stays reserved against new ones
        while queue.waiting and budget > 0 and len(queue.running) < self.limits.max_running:
            request = queue.waiting[0]
            needed = self._admit(rank, queue, request, kv_free)
            if not needed:
                break
            kv_free -= needed
            if not self._loading_R[request]:
                count = min(self._prefill_left(request), budget)
                prefill.append((request, count))
                budget -= count
        parts: list[_Entries] = []
        if len(decoding):
            parts.append((rank, decoding, DECODE, np.ones(len(decoding), dtype=np.int64)))
        if prefill:
            ids, counts = np.array(prefill, dtype=np.int64).T
            parts.append((rank, ids, PREFILL, counts))
        if not parts and len(queue.running) > 1 and not self._loading_R[queue.running].any():
            self._preempt(rank, queue, queue.running[-1])  # started prompts block each other: restart the youngest
            running = np.array(queue.running, dtype=np.int64)
            return self._plan_queue(rank, queue, running, self._decodes(running))
        return parts

    def _admit(self, rank: int, queue: _Queue, request: int, kv_free: int) -> int:
        """Start the waiting request if its KV fits into kv_free; the KV tokens that it takes or reserves, 0 if it does
        not fit. Blocks of its prefix that the rank holds are computed already."""
        asked, remote = self.requests[request], bool(self._remote_R[request])
        blocks, woken = (0, 0) if remote else self.kv.hit(rank, asked)
        hit = blocks * self.limits.prefix_block_tokens
        needed = self._prefill_left(request) - hit + woken
        if needed + 1 > kv_free:
            return 0
        queue.waiting.popleft()
        queue.running.append(request)
        if remote:
            self._remote_R[request], self._loading_R[request] = False, True
            self._fetches.append(request)
            self.computed_R[request] = asked.prompt_len
            self.kv.used_G[rank] += asked.prompt_len
            return needed
        if self.hit_tokens_R[request] < 0:
            self.hit_tokens_R[request] = hit
        if blocks:
            self.kv.take(rank, asked, blocks)
            self.computed_R[request] = hit
        return needed

    def _preempt(self, rank: int, queue: _Queue, victim: int) -> int:
        """Give back all KV of the youngest running request, whose tokens will be recomputed; returns the tokens freed."""
        queue.running.remove(victim)
        queue.waiting.appendleft(victim)
        freed = self._free_kv(victim)
        self.computed_R[victim] = 0
        self._loading_R[victim] = False
        self._steady = None
        self.preemptions += 1
        return freed

    def _free_kv(self, request: int) -> int:
        return self.kv.give_back(int(self.rank_R[request]), request, int(self.computed_R[request]))
