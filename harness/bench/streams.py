"""Virtual ranks of one GPU at work at the same time, as ranks with a GPU each are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def side_by_side(calls: Sequence[Callable[[], Tensor]], device: str) -> list[Tensor]:
    """Results of all calls, each on a stream of its own between what came before and what comes after; a graph that is being
    captured gets a branch each. In order on a CPU."""
    if device != "cuda":
        return [call() for call in calls]
    here, results = torch.cuda.current_stream(), []
    streams = [torch.cuda.Stream() for _ in calls]
    for call, stream in zip(calls, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(call())
    for stream in streams:
        here.wait_stream(stream)
    return results
