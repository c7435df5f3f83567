"""Time of work on a GPU: the host launches everything before the clock starts, and all ranks' devices start together.

    sleep      the device is busy for some milliseconds, so that the launches below are queued while it sleeps
    meet       a small all-reduce on the stream: no device passes it before all have come (not between virtual ranks)
    start, work, end     events on the stream around the work; the host waits for the second one

Without the sleep the device waits for each launch of a short piece, and the figure is the host's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SLEEP_CYCLES = 20_000_000  # about 10 ms at 2 GHz


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
    return int(start.elapsed_time(end) * 1e6)


def devices_meet(device: torch.device) -> Callable[[], None] | None:
    """A barrier on the streams of all ranks' devices; None where ranks are on CPUs or alone, or virtual."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    one = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(one)

    return meet
