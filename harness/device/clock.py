"""Time of work on a GPU: the host launches everything before the clock starts, and all ranks' devices start together.

    sleep      the device is busy for some milliseconds, so that the launches below are queued while it sleeps
    meet       a small all-reduce on the stream: no device passes it before all have come (not between virtual ranks)
    start, work, end     events on the stream around the work; the host waits for the second one

Without the sleep the device waits for each launch of a short piece, and the figure is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..timing import NO_PHASE, Output, PhaseTimer

SLEEP_CYCLES = 20_000_000  # about 10 ms at 2 GHz
WARM_UPS = 3  # compile kernels and let libraries allocate, before anything is captured


def warm_up(run: Callable[[], Any]) -> None:
    """Calls of `run` on a stream of their own, which a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)


def device_ns(work: Callable[[], Any], meet: Callable[[], Any] | None = None, cuda: Any = torch.cuda) -> int:
    """Nanoseconds of `work` on the current stream. cuda: torch.cuda, or what stands for it."""
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(SLEEP_CYCLES)
    if meet is not None:
        meet()
    start.record()
    work()
    end.record()
    end.synchronize()
    return _between_ns(start, end)


def together_us(work: Callable[[], Any], device: torch.device, meet: Callable[[], Any] | None) -> float:
    """Microseconds of `work` on this rank from where all ranks meet: by `device_ns` on a GPU, else behind a barrier on the
    host's clock. Collective."""
    if device.type == "cuda":
        return device_ns(work, meet) / 1e3
    dist.barrier()
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


class DeviceTimer(PhaseTimer):
    """Phases by events on the stream: nothing waits for the device before the end of a layer, so that the host stays ahead of
    it (a layer that reads sizes on the host waits there, and from there on launching counts).

    Marks are nanoseconds since the devices of all ranks met, so those of all ranks lie beside each other.
    """

    def __init__(self, meet: Callable[[], Any] | None = None, cuda: Any = torch.cuda) -> None:
        super().__init__()
        self._meet, self._cuda = meet, cuda
        self._events: list[tuple[str, Any]] = []

    def start_layer(self) -> None:
        self._events = []
        self.lap(NO_PHASE)

    def lap(self, phase: str) -> None:
        self._events.append((phase, self._event()))

    def clocked(self, layer: Callable[[], Output]) -> tuple[int, Output]:
        self._cuda._sleep(SLEEP_CYCLES)
        if self._meet is not None:
            self._meet()
        start = self._event()
        output = layer()
        end = self._event()
        end.synchronize()
        self.marks_L.append([(phase, _between_ns(start, event)) for phase, event in self._events])
        return _between_ns(start, end), output

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_ns(start: Any, end: Any) -> int:
    return int(start.elapsed_time(end) * 1e6)


def timer_of(device: torch.device, kind: str, virtual: bool) -> PhaseTimer:
    """The timer of a rank that computes there. Served steps are timed as they come, launching included, and virtual ranks
    share one stream: the host's clock for both, and it waits for the device after every phase."""
    if device.type != "cuda":
        return PhaseTimer()
    if kind == "batches" and not virtual:
        return DeviceTimer(devices_meet(device))
    return PhaseTimer(torch.cuda.synchronize)


def devices_meet(device: torch.device) -> Callable[[], None] | None:
    """A barrier on the streams of all ranks' devices; None where ranks are on CPUs or alone, or virtual."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    one = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(one)

    return meet
