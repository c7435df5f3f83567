"""Discrete-event simulation of a served workload, and of fixed batches, over the shared core's state machines.

    arrivals ──submit──> ServingLoop ──StepPlan──> StepTimer ──duration──> complete

Simulated time is simpy's, in milliseconds. All ranks of attention-DP step together: a step lasts as long as its slowest
rank in every phase, and ranks without a request take part with no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from semmoe.serving import Request, ServingLoop, StepPlan, TokenRows

from .step_timer import StepTimer, Timeline, Timer

Event = Generator[Any, Any, None]
MOST_AHEAD = 64  # steps priced at once


class Server:
    """One loop with the ranks that it drives, as a process of simulated time: steps of predicted length, one after the
    other. after_plan() and after_step() are called when a step has been formed and when it is over."""

    def __init__(
        self,
        env: simpy.Environment,
        loop: ServingLoop,
        timer: Timer,
        after_plan: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.env, self.loop, self.timer, self.after_plan, self.after_step = env, loop, timer, after_plan, after_step
        self._work = env.event()
        self._step_ms = 0.0  # of the last step
        env.process(self._steps())

    def submit(self, request: Request, first_token_ms: float | None = None) -> None:
        """Hand a request to the loop now."""
        self.loop.submit(request, self.env.now, first_token_ms)
        self.wake()

    def wake(self) -> None:
        """There may be something to do again."""
        if not self._work.triggered:
            self._work.succeed()

    def _steps(self) -> Event:
        while True:
            step = self.loop.next_step(self.env.now)
            self.after_plan()
            if not isinstance(step, StepPlan):
                self._work = self.env.event()
                yield self._work
                continue
            stretch = self.loop.stretch(self._likely_steps())
            steps_ms = self.timer.run_ahead(stretch, self.loop.tokens, len(self.loop.queues))
            now_ms, ends_ms, event_ms = float(self.env.now), list[float](), self.env.peek()
            for step_ms in steps_ms:
                self.timer.timeline.start_ms.append(now_ms)
                now_ms += step_ms
                ends_ms.append(now_ms)
                if now_ms < event_ms and len(ends_ms) < len(steps_ms):
                    continue  # nothing happens before it ends
                yield self.env.timeout(max(now_ms - self.env.now, 0.0))
                event_ms = self.env.peek()
                if self.loop.pending:
                    break
            self.timer.keep(len(ends_ms))
            self._step_ms = steps_ms[-1]
            self.loop.complete_stretch(stretch, ends_ms)
            self.after_step()

    def _likely_steps(self) -> int:
        """Steps that end before the next arrival, if they last as long as the step before: more would be priced in vain."""
        gap_ms = self.loop.next_arrival_ms() - self.env.now
        if not 0 < gap_ms < MOST_AHEAD * self._step_ms:  # an arrival in the past is with another loop
            return MOST_AHEAD
        return min(int(gap_ms / self._step_ms) + 1, MOST_AHEAD)


def arrivals(env: simpy.Environment, requests: Iterable[Request], submit: Callable[[Request], None]) -> Event:
    """Process that submits every request at its time."""
    for request in sorted(requests, key=lambda r: (r.arrival_ms, r.id)):
        if request.arrival_ms > env.now:
            yield env.timeout(request.arrival_ms - env.now)
        submit(request)


def simulate_serving(loop: ServingLoop, timer: Timer, show: bool = False) -> Timeline:
    """Serve every request of the loop: arrivals at their times, steps of predicted length. show: a progress bar."""
    env = simpy.Environment()
    over = env.event()

    with progress(len(loop.requests), "serving", show) as bar:

        def after_step() -> None:
            bar.update(len(loop.requests) - loop.unfinished - bar.n)
            if loop.done:
                over.succeed()

        env.process(arrivals(env, loop.requests, Server(env, loop, timer, after_step=after_step).submit))
        if not loop.done:
            env.run(until=over)
    timer.timeline.end_ms = float(env.now)
    return timer.timeline


def replay(plans: Iterable[StepPlan], tokens: TokenRows, queues: int, timer: StepTimer) -> Timeline:
    """Re-execute logged step plans: the same batches as the logged run formed, with predicted durations."""
    for step in plans:
        timer.timeline.start_ms.append(timer.timeline.end_ms)
        timer.timeline.end_ms += timer.run_plan(step, tokens, queues).step_ms
    return timer.timeline


def simulate_batches(
    batches: Iterator[tuple[NDArray[np.int64], NDArray[np.integer] | None]], timer: StepTimer, show: bool = False
) -> Timeline:
    """Fixed batches of (rows of the trace, home rank of each row or None), one forward pass each."""
    with progress(None, "batches", show) as bar:
        for rows_T, queue_T in batches:
            timer.timeline.start_ms.append(timer.timeline.end_ms)
            timer.run(rows_T, queue_T, timer.batch_load(len(rows_T), queue_T))
            timer.timeline.end_ms += timer.timeline.steps[-1].step_ms
            bar.update()
    return timer.timeline


def progress(total: int | None, what: str, show: bool) -> Any:
    """A progress bar on standard error, on a terminal and after two seconds only."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, delay=2, disable=not (show and sys.stderr.isatty()), leave=False)
