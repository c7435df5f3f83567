"""Time limits of placements: compiling does not count."""

from __future__ import annotations

import time

import numba
import numba.core.event as events
import pytest
from placement_problems import problem

from semmoe.placement import semantic
from semmoe.placement.search_clock import search_s
from semmoe.placement.semantic import Semantic
from semmoe.sources.synthetic import Synthetic

LOCK = "numba:compiler_lock"


def test_the_clock_stands_still_inside_numba_and_goes_on_behind_it() -> None:
    events.start_event(LOCK)
    first = search_s()
    events.start_event(LOCK)  # a callee, or another thread that waits
    time.sleep(0.02)
    events.end_event(LOCK)
    assert search_s() == first
    events.end_event(LOCK)
    second = search_s()
    assert second - first < 0.02
    time.sleep(0.01)
    assert search_s() >= second + 0.01


def test_the_clock_never_goes_back() -> None:
    times = []
    for _ in range(3):
        times.append(search_s())
        with events.trigger_event(LOCK):
            times.append(search_s())
    assert times == sorted(times)


def test_compiling_a_kernel_takes_no_time_of_a_search() -> None:
    seen: list[float] = []

    class Listener(events.Listener):
        def on_start(self, event: events.Event) -> None:
            seen.append(search_s())

        on_end = on_start

    @numba.njit
    def kernel(x):  # type: ignore[no-untyped-def]
        return x + 1

    with events.install_listener("numba:compile", Listener()):
        assert kernel(1) == 2
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_search_that_compiles_for_longer_than_its_limit_makes_all_its_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    improved = semantic.TokenSide.improved

    def slow(self, start, weight):  # type: ignore[no-untyped-def]
        with events.trigger_event(LOCK):
            time.sleep(0.25)
        return improved(self, start, weight)

    trace = Synthetic(requests=6, prompt_len=20, output_len=0, num_experts=8, top_k=2, layers=1, groups=4).make()
    given = problem(trace, 4, time_limit_s=1.0)
    monkeypatch.setattr(semantic, "EFFORT", 0.0)
    warm = Semantic(restarts=6).place(given)
    monkeypatch.setattr(semantic.TokenSide, "improved", slow)
    cold = Semantic(restarts=6).place(given)
    assert cold.notes["starts"] == warm.notes["starts"] == 6
    assert cold.physical_to_logical_LP.tolist() == warm.physical_to_logical_LP.tolist()
