"""BatchPlanner: which tokens of which requests the next step computes.

Queue by queue: a token of every running request that decodes; then chunks of the prompts that started; then new requests
as long as their KV fits. Where decoding requests lack room, the youngest gives its KV back and is recomputed later. While
nothing but decoding goes on, the plan of a step repeats that of the step before, one position on, and many steps can be
planned at once (`stretch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .kv_store import KvStore
from .states import RequestStates
from .stepplan import DECODE, PREFILL, ServingLimits, StepPlan, Stretch

_Entries = tuple[int, NDArray[np.int64], int, NDArray[np.int64]]  # rank, requests, phase, token counts


@dataclass(eq=False)
class Queue:
    """Requests of one rank (attention-TP: of all ranks) by id, oldest first."""

    waiting: deque[int] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)


class BatchPlanner:
    """Plans over the requests of `queues`, whose KV lies in `kv`. preemptions: how often KV was taken back. fetches:
    requests from another loop whose KV got room here and should be sent."""

    def __init__(self, states: RequestStates, queues: Sequence[Queue], kv: KvStore, limits: ServingLimits) -> None:
        self.states, self.queues, self.kv, self.limits = states, queues, kv, limits
        self.preemptions = 0
        self.fetches: list[int] = []
        self._steady: tuple[StepPlan, NDArray[np.int64]] | None = None  # plan to repeat, its entries on each queue

    def changed(self) -> None:
        """Requests came, went or got their KV: the next plan does not repeat the last one."""
        self._steady = None

    def plan(self, index: int) -> StepPlan | None:
        """The plan of step `index`; None: there is nothing to do."""
        if self._steady is not None:
            last, count_G = self._steady
            if not (count_G > self.limits.kv_tokens - self.kv.used_G).any():
                start_N = self.states.computed_R[last.request_N]
                return StepPlan(index, last.rank_N, last.request_N, last.phase_N, start_N, last.count_N)
        plan = self._form(index)
        self._steady = None if plan is None else self._steady_after(plan)
        return plan

    def _form(self, index: int) -> StepPlan | None:
        running = np.array([request for queue in self.queues for request in queue.running], dtype=np.int64)
        decodes = self.states.decode(running)
        parts: list[_Entries] = []
        begin = 0
        for rank, queue in enumerate(self.queues):
            mine = slice(begin, begin + len(queue.running))
            begin = mine.stop
            if queue.running or queue.waiting:
                parts += self._entries(rank, queue, running[mine], decodes[mine])
        if not parts:
            return None
        ranks, ids, phases, counts = zip(*parts, strict=True)
        lengths, request_N = [len(part) for part in ids], np.concatenate(ids)
        rank_N, phase_N = np.repeat(ranks, lengths), np.repeat(phases, lengths)
        return StepPlan(index, rank_N, request_N, phase_N, self.states.computed_R[request_N], np.concatenate(counts))

    def _entries(
        self, rank: int, queue: Queue, running: NDArray[np.int64], decodes: NDArray[np.bool_]
    ) -> list[_Entries]:
        """Entries of one queue: decodes, then prompts."""
        loading_R = self.states.loading_R
        budget, kv_free = self.limits.max_batch_tokens, self.kv.free_tokens(rank)
        decoding = running[decodes]
        while len(decoding) > kv_free:
            kv_free += self._preempt(rank, queue, queue.running[-1])
            running, decodes = running[:-1], decodes[:-1]
            decoding = running[decodes]
        kv_free -= len(decoding)
        started = running[~decodes & ~loading_R[running]].tolist() if len(decoding) < len(running) else []
        decoding = decoding[:budget]
        budget -= len(decoding)
        prefill: list[tuple[int, int]] = []
        for request in started:
            left = self.states.left_of(request)
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
            if not loading_R[request]:
                count = min(self.states.left_of(request), budget)
                prefill.append((request, count))
                budget -= count
        parts: list[_Entries] = []
        if len(decoding):
            parts.append((rank, decoding, DECODE, np.ones(len(decoding), dtype=np.int64)))
        if prefill:
            ids, counts = np.array(prefill, dtype=np.int64).T
            parts.append((rank, ids, PREFILL, counts))
        if not parts and len(queue.running) > 1 and not loading_R[queue.running].any():
            self._preempt(rank, queue, queue.running[-1])  # started prompts block each other: restart the youngest
            running = np.array(queue.running, dtype=np.int64)
            return self._entries(rank, queue, running, self.states.decode(running))
        return parts

    def _admit(self, rank: int, queue: Queue, request: int, kv_free: int) -> int:
        """Start the waiting request if its KV fits into kv_free; the KV tokens that it takes or reserves, 0 if it does
        not fit. Blocks of its prefix that the rank holds are computed already."""
        states = self.states
        asked, remote = states.requests[request], bool(states.remote_R[request])
        blocks, woken = (0, 0) if remote else self.kv.hit(rank, asked)
        hit = blocks * self.limits.prefix_block_tokens
        needed = states.left_of(request) - hit + woken
        if needed + 1 > kv_free:
            return 0
        queue.waiting.popleft()
        queue.running.append(request)
        if remote:
            states.remote_R[request], states.loading_R[request] = False, True
            self.fetches.append(request)
            states.computed_R[request] = asked.prompt_len
            self.kv.used_G[rank] += asked.prompt_len
            return needed
        if states.hit_tokens_R[request] < 0:
            states.hit_tokens_R[request] = hit
        if blocks:
            self.kv.take(rank, asked, blocks)
            states.computed_R[request] = hit
        return needed

    def _preempt(self, rank: int, queue: Queue, victim: int) -> int:
        """Give back all KV of the youngest running request, whose tokens will be recomputed; returns the tokens freed."""
        queue.running.remove(victim)
        queue.waiting.appendleft(victim)
        freed = self.free_kv(victim)
        self.states.computed_R[victim] = 0
        self.states.loading_R[victim] = False
        self.preemptions += 1
        return freed

    def free_kv(self, request: int) -> int:
        """Give back all KV of a request; returns the tokens freed."""
        return self.kv.give_back(int(self.states.rank_R[request]), request, int(self.states.computed_R[request]))

    def _steady_after(self, plan: StepPlan) -> tuple[StepPlan, NDArray[np.int64]] | None:
        """The plan as what to repeat, where it holds all that there is to do and all of it decodes."""
        running = sum(len(queue.running) for queue in self.queues)
        if running != len(plan.request_N) or any(queue.waiting for queue in self.queues) or not plan.phase_N.all():
            return None
        return plan, np.bincount(plan.rank_N, minlength=len(self.queues))

    def stretch(self, step: StepPlan, most: int) -> Stretch:
        """A step and those that follow it unless requests or KV arrive, `most` in all: as long as every running request
        decodes and all of them have room."""
        states = self.states
        if most == 1 or self.kv.caching or any(queue.waiting for queue in self.queues):
            return Stretch(step, StepPlan(step.index + 1, *np.zeros((5, 0), dtype=np.int64)))
        ids = np.array([request for queue in self.queues for request in queue.running], dtype=np.int64)
        next_N = states.prompt_R[ids] + states.produced_R[ids]  # computed tokens, once the step is over
        left_N = states.output_R[ids] - states.produced_R[ids] - 1
        if len(ids) != len(step.request_N) or int(next_N.sum()) != int(step.kv_len_N.sum()):
            most = 1  # somebody is not in it, or does not finish its prompt
        rank_N, queues = states.rank_R[ids], len(self.queues)
        free_G = (
            self.limits.kv_tokens - self.kv.used_G - np.bincount(step.rank_N, step.count_N, queues).astype(np.int64)
        )
        room_G = free_G // np.maximum(np.bincount(rank_N[left_N > 0], minlength=queues), 1)
        count_N = np.minimum(left_N, max(min(most - 1, int(room_G.min())), 0))
        kept = count_N > 0
        ids, count_N = ids[kept], count_N[kept]
        phase_N = np.full(len(ids), DECODE, dtype=np.int64)
        return Stretch(step, StepPlan(step.index + 1, rank_N[kept], ids, phase_N, next_N[kept], count_N))
