"""What stands for torch.cuda where there is none."""

from __future__ import annotations

from typing import Any


class Cuda:
    """torch.cuda as far as the clock needs it: a stream that does what is queued when somebody waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.queue: list[tuple[str, float, Any]] = []
        self.now_ms = 0.0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at_ms = -1.0

            def record(self) -> None:
                cuda.queue.append(("event", 0.0, self))

            def synchronize(self) -> None:
                cuda.synchronize()

            def elapsed_time(self, later: Event) -> float:
                return later.at_ms - self.at_ms

        self.Event = Event

    def synchronize(self) -> None:
        for what, ms, event in self.queue:
            self.now_ms += ms
            self.log.append(what)
            if event is not None:
                event.at_ms = self.now_ms
        self.queue.clear()

    def _sleep(self, cycles: int) -> None:
        self.queue.append(("sleep", cycles / 2e6, None))

    def launch(self, what: str, ms: float) -> None:
        self.queue.append((what, ms, None))
