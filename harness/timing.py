"""PhaseTimer: where the time of a layer goes on one rank, with one clock read a phase."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter_ns
from typing import TypeVar

Output = TypeVar("Output")
PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag")
EXCHANGES = ("srs", "dispatch", "combine", "sag")  # phases in which ranks wait for each other
NO_PHASE = ""  # of marks: the start, and what is skipped
Marks = list[tuple[str, int]]  # ("", start), then each phase with the nanosecond that it ended at


class PhaseTimer:
    """`start_layer()`, then `lap(phase)` after each phase marks where it ended.

    marks_L: Marks of every layer since `reset`, on the machine's monotonic clock: all ranks of a machine share it. On a
    device with its own stream pass its synchronise function as `wait`, else a lap measures the launch only.
    """

    def __init__(self, wait: Callable[[], None] | None = None, clock: Callable[[], int] = perf_counter_ns) -> None:
        self.marks_L: list[Marks] = []
        self._wait, self._clock = wait, clock
        self.waits = True  # False: phases are not asked for, and the host may run ahead

    def reset(self) -> None:
        self.marks_L = []

    def start_layer(self) -> None:
        self.marks_L.append([(NO_PHASE, self._clock())])

    def skip(self) -> None:
        """What was done since the last lap belongs to no phase."""
        self.lap(NO_PHASE)

    def lap(self, phase: str) -> None:
        if self._wait is not None and self.waits:
            self._wait()
        self.marks_L[-1].append((phase, self._clock()))

    def clocked(self, layer: Callable[[], Output]) -> tuple[int, Output]:
        """(nanoseconds of a layer on this rank, what it gave)."""
        start = perf_counter_ns()
        output = layer()
        return perf_counter_ns() - start, output

    @property
    def laps_ns(self) -> list[dict[str, int]]:
        """Nanoseconds of every layer by phase."""
        return [laps_of(marks) for marks in self.marks_L]


def laps_of(marks: Marks) -> dict[str, int]:
    """Nanoseconds by phase. Worked example: [("", 5), ("gate", 8), ("permute", 9), ("gate", 10)] -> gate 4, permute 1."""
    laps = dict.fromkeys(PHASES, 0)
    for (_, start), (phase, end) in pairwise(marks):
        if phase != NO_PHASE:
            laps[phase] += end - start
    return laps
