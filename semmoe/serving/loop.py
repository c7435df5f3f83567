"""ServingLoop: continuous batching as one pure state machine, without a clock of its own.

`submit(request, now_ms)`, `next_step(now_ms) -> StepPlan | wake_at_ms | None`, `complete(step, duration_ms, finished)`.
The simulator drives it with predicted durations, the harness with measured ones. In attention-DP there is one queue a
rank and all ranks step together (idle ranks hold no entry); in attention-TP one queue feeds all ranks (`queues = 1`).
Which tokens a step computes: batching.py.

Prefill-decode disaggregation is two loops. The one that prefills holds a finished prompt's KV (`hold_kv`) until
`free(request)`. The one that decodes gets requests with `submit(..., first_token_ms)`; as soon as it has room for the KV of
one, it names it in `fetches()`, and the request decodes once `fetched(request)` says that the KV is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..schedule.base import RankStates, RequestScheduler, assign_all
from .batching import BatchPlanner, Queue
from .kv_store import KvStore
from .states import RequestStates
from .stepplan import Request, ServingLimits, StepPlan, Stretch

Known = Callable[[Request], NDArray[np.int64] | None]  # of a request: see ServingLoop


class ServingLoop(RequestStates):
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
        super().__init__(requests)
        for request in self.requests:
            if request.prompt_len + request.output_len > limits.kv_tokens:
                raise UserError(
                    f"request {request.id} needs {request.prompt_len + request.output_len} KV tokens; a rank has "
                    f"{limits.kv_tokens} (raise serving.kv_tokens or shorten it)"
                )
        self.limits, self.scheduler, self.score_of, self.head_of = limits, scheduler, score_of, head_of
        self.hold_kv = hold_kv
        self.queues = [Queue() for _ in range(queues)]
        self.kv = KvStore(self.requests, queues, limits)
        self.steps = 0
        self._planner = BatchPlanner(self, self.queues, self.kv, limits)
        self._gaps_ms: list[NDArray[np.float64]] = []
        self._pending: list[int] = []
        self._in_flight: StepPlan | None = None
        self._now_ms = self._step_start_ms = 0.0
        self._unfinished = len(self.requests)
        self._submitted = np.zeros(len(self.requests), dtype=bool)
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
    def pending(self) -> bool:
        """Whether requests arrived since the last step was formed."""
        return bool(self._pending)

    @property
    def preemptions(self) -> int:
        """How often a request had to give back its KV and was recomputed."""
        return self._planner.preemptions

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
            self.remote_R[request.id] = True
            self.produced_R[request.id] = 1
            self.first_token_ms_R[request.id] = self.last_token_ms_R[request.id] = first_token_ms

    def next_step(self, now_ms: float) -> StepPlan | float | None:
        """The next StepPlan; or the time of the next arrival when nothing can run; or None when nothing will ever (or
        until KV arrives that `fetches` asked for)."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.index} is still in flight; complete it first")
        self._now_ms = max(self._now_ms, now_ms)
        self._assign_pending()
        plan = self._planner.plan(self.steps)
        if plan is None:
            arrival_ms = self.next_arrival_ms()
            return arrival_ms if arrival_ms < np.inf else None
        self._in_flight = plan
        self._step_start_ms = self._now_ms
        self.steps += 1
        return plan

    def complete(self, step: StepPlan, duration_ms: float, finished: Iterable[int] = ()) -> None:
        """The step took duration_ms. `finished`: requests that ended early (end-of-sequence seen by a real model)."""
        if self._in_flight is not step:
            raise RuntimeError(f"step {step.index} is not in flight")
        if not duration_ms >= 0:
            raise ValueError(f"duration_ms={duration_ms} must be a number >= 0")
        # requests may have arrived meanwhile
        self._finish(step, max(self._now_ms, self._step_start_ms + duration_ms), finished)

    def stretch(self, most: int) -> Stretch:
        """The step in flight and those that follow it unless requests or KV arrive, `most` in all: as long as every
        running request decodes and all of them have room."""
        assert self._in_flight is not None
        return self._planner.stretch(self._in_flight, most)

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

    def fetches(self) -> list[int]:
        """Requests whose KV has room here since the last call and should be sent now."""
        wanted, self._planner.fetches = self._planner.fetches, []
        return wanted

    def fetched(self, request: int) -> None:
        """The KV of a request from `fetches` has arrived."""
        self.loading_R[request] = False
        self._planner.changed()

    def free(self, request: int) -> None:
        """Give back the KV of a finished request that was held (`hold_kv`)."""
        self._planner.free_kv(request)

    def reschedule(self, score_of: Known, head_of: Known) -> None:
        """Requests get their queues by these from now on, those that wait without KV too; the others stay with theirs.
        The scheduler is the same."""
        self.score_of, self.head_of = score_of, head_of
        if len(self.queues) == 1:
            return
        for queue in self.queues:
            self._pending += [request for request in queue.waiting if not self.remote_R[request]]
            queue.waiting = deque(request for request in queue.waiting if self.remote_R[request])
        self._pending.sort(key=lambda request: (self.arrival_ms_R[request], request))

    def rank_states(self) -> RankStates:
        """What a request scheduler sees."""
        ids = np.array([r for queue in self.queues for r in (*queue.waiting, *queue.running)], dtype=np.int64)
        queued_G = np.bincount(self.rank_R[ids], weights=self.left(ids), minlength=len(self.queues))
        return RankStates(
            queued_G.astype(np.int64),
            np.array([len(q.running) for q in self.queues], dtype=np.int64),
            np.array([len(q.waiting) for q in self.queues], dtype=np.int64),
            self.kv.used_G.copy(),
            self.limits.kv_tokens,
        )

    def next_arrival_ms(self) -> float:
        """When the next request arrives that was not submitted yet; infinity: all were."""
        order_R = self._arrival_order_R
        while self._arrived < len(order_R) and self._submitted[order_R[self._arrived]]:
            self._arrived += 1
        return float(self.arrival_ms_R[order_R[self._arrived]]) if self._arrived < len(order_R) else np.inf

    def _assign_pending(self) -> None:
        if not self._pending:
            return
        self._planner.changed()
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
        self._planner.changed()
        if not self.hold_kv:
            self._planner.free_kv(request)
        self.finish_ms_R[request] = end_ms
        self._unfinished -= 1
