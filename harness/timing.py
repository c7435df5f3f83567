"""PhaseTimer: where the time of a layer goes on one rank, with one clock read a phase."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag")


class PhaseTimer:
    """`start_layer()`, then `lap(phase)` after each phase adds the nanoseconds since the lap before it.

    laps_ns[l][phase]: nanoseconds of layer l since `reset`. On a device with its own stream pass its synchronise
    function as `wait`, else a lap measures the launch only.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self.laps_ns: list[dict[str, int]] = []
        self._wait = wait
        self._last = 0

    def reset(self) -> None:
        self.laps_ns = []

    def start_layer(self) -> None:
        self.laps_ns.append(dict.fromkeys(PHASES, 0))
        self._last = perf_counter_ns()

    def skip(self) -> None:
        """What was done since the last lap belongs to no phase."""
        if self._wait is not None:
            self._wait()
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        if self._wait is not None:
            self._wait()
        now = perf_counter_ns()
        self.laps_ns[-1][phase] += now - self._last
        self._last = now
