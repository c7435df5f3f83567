"""PhaseTimer: where the time of a layer goes on one rank, with one clock read a phase."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns

PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag")
EXCHANGES = ("srs", "dispatch", "combine", "sag")  # phases in which ranks wait for each other
Marks = list[tuple[str, int]]  # ("", start), then each phase with the nanosecond that it ended at


class PhaseTimer:
    """`start_layer()`, then `lap(phase)` after each phase marks where it ended.

    marks_L: Marks of every layer since `reset`, on the machine's monotonic clock: all ranks of a machine share it. On a
    device with its own stream pass its synchronise function as `wait`, else a lap measures the launch only.
    """

    def __init__(self, wait: Callable[[], None] | None = None, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.marks_L: list[Marks] = []
        self._wait, self._clock = wait, clock

    def reset(self) -> None:
        self.marks_L = []

    def start_layer(self) -> None:
        self.marks_L.append([("", self._clock())])

    def skip(self) -> None:
        """What was done since the last lap belongs to no phase."""
        if self._wait is not None:
            self._wait()
        self._last = perf_counter_ns()

    def lap(self, phase: str) -> None:
        if self._wait is not None:
            self._wait()
        self.marks_L[-1].append((phase, self._clock()))

    @property
    def laps_ns(self) -> list[dict[str, int]]:
        """Nanoseconds of every layer by phase."""
        return [laps_of(marks) for marks in self.marks_L]


def laps_of(marks: Marks) -> dict[str, int]:
    """Nanoseconds by phase. Worked example: [("", 5), ("gate", 8), ("permute", 9), ("gate", 10)] -> gate 4, permute 1."""
    laps = dict.fromkeys(PHASES, 0)
    for (_, start), (phase, end) in pairwise(marks):
        laps[phase] += end - start
    return laps
