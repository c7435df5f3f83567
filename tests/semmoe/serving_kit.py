"""A serving loop driven to its end without a clock or a machine."""

from __future__ import annotations

from semmoe.serving import ServingLoop, StepPlan


def drive(loop: ServingLoop, step_ms: float = 1.0, limit: int = 100_000) -> list[StepPlan]:
    """Run to the end with a constant step time; arrivals are handed in as their time comes."""
    now, plans, todo = 0.0, [], sorted(loop.requests, key=lambda r: r.arrival_ms)
    while not loop.done:
        while todo and todo[0].arrival_ms <= now:
            loop.submit(todo.pop(0), now)
        step = loop.next_step(now)
        assert step is not None, "the loop gave up with requests unfinished"
        if isinstance(step, float):
            now = step
            continue
        plans.append(step)
        now += step_ms
        loop.complete(step, step_ms)
        assert len(plans) < limit
    return plans
