"""Time that a search may use: a clock that stands still while numba compiles kernels or loads them from its cache.

With it a time limit bounds the search alone, so that a cold cache makes a placement later, not worse.
"""

from __future__ import annotations

import threading
import time

import numba.core.event as events


class _Pause(events.Listener):
    """Sums the seconds in which any thread waits for numba's compiler or is in it; both happen before a kernel runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._since_s = self._paused_s = 0.0

    def on_start(self, event: events.Event) -> None:
        with self._lock:
            if self._inside == 0:
                self._since_s = time.monotonic()
            self._inside += 1

    def on_end(self, event: events.Event) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._paused_s += time.monotonic() - self._since_s

    def running_s(self) -> float:
        with self._lock:
            now_s = self._since_s if self._inside else time.monotonic()
            return now_s - self._paused_s


_pause = _Pause()
events.register("numba:compiler_lock", _pause)


def search_s() -> float:
    """Seconds on the monotonic clock less those of compiling so far, in all threads."""
    return _pause.running_s()
