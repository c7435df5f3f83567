"""The variants of one case on every rank: checked against the case's result, then timed in turn.

Called ("eager"), and on GPUs replayed from a CUDA graph ("graph") where one can hold the variant, with warm caches and after a
flush; what a graph wrote is checked again after its replays. Ranks agree on what is wrong and on what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device.clock import devices_meet, together_us
from ..poison import poisoned

FLUSH_BYTES = 256 << 20
UNABLE = "cannot run here:"
READS_SIZES = {"index_all_to_all": "the library's call wants its sizes on the host"}  # so that no graph holds it


@dataclass(frozen=True, eq=False)
class RankCase:
    """variants: name -> call that returns this rank's result, `expected` within `tolerance`. skipped: name -> why.
    port_bytes: name -> payload that crosses the busiest rank's port, one way, as nccl-tests' bus bandwidth counts it.
    outputs: buffers of this rank alone that variants write into, NaN before every check: what another one left is no result."""

    name: str
    variants: dict[str, Callable[[], Tensor]]
    expected: Tensor
    tolerance: float
    skipped: dict[str, str] = field(default_factory=dict)
    port_bytes: dict[str, int] = field(default_factory=dict)
    outputs: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Timed:
    """What one rank has of one case. error: variant -> what is wrong, or None; us: (variant, mode) -> microseconds;
    port_bytes: variant -> see RankCase."""

    case: str
    error: dict[str, str | None]
    skipped: dict[str, str]
    us: dict[tuple[str, str], list[float]]
    port_bytes: dict[str, int] = field(default_factory=dict)


def check_and_time(case: RankCase, rounds: int, device: torch.device) -> Timed:
    """Collective."""
    told = on_all_ranks({name: _error(case, name) for name in case.variants})
    skipped = case.skipped | {name: text for name, text in told.items() if text and text.startswith(UNABLE)}
    error = {name: text for name, text in told.items() if name not in skipped}
    right = {name: case.variants[name] for name, text in error.items() if text is None}
    us = time_all(right, rounds, device, "eager")
    if device.type == "cuda":
        graphs, refused = captured(right)
        us |= time_all({name: replay for name, (replay, _) in graphs.items()}, rounds, device, "graph")
        after = on_all_ranks({name: _wrong(case, result) for name, (_, result) in graphs.items()})
        error |= {name: f"after replays: {text}" for name, text in after.items() if text}
        skipped |= {f"{name}, graph": reason for name, reason in refused.items()}
    return Timed(case.name, error, skipped, us, case.port_bytes)


def captured(
    variants: dict[str, Callable[[], Tensor]],
) -> tuple[dict[str, tuple[Callable[[], None], Tensor]], dict[str, str]]:
    """(variant -> its replay and the result that it writes, variant -> why no graph holds it). Collective."""
    from ..device.graph import record

    made: dict[str, tuple[Callable[[], None], Tensor]] = {}
    failed: dict[str, str | None] = {}
    for name, call in variants.items():
        results: list[Tensor] = []
        reason = READS_SIZES.get(name)
        try:
            if reason is None:
                replay = record(partial(_keep, results, call), None)
                made[name] = replay, results[-1]
        except RuntimeError as error:
            reason = f"{UNABLE} {str(error).strip().splitlines()[0]}"
        failed[name] = reason
    refused = {name: text for name, text in on_all_ranks(failed).items() if text}
    return {name: graph for name, graph in made.items() if name not in refused}, refused


def time_all(
    variants: dict[str, Callable[[], Any]], rounds: int, device: torch.device, how: str
) -> dict[tuple[str, str], list[float]]:
    """(variant, mode) -> microseconds of every round on this rank. Modes: how + "_warm"; on GPUs "_cold" too, after a flush."""
    on_gpu = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if on_gpu else None
    meet = devices_meet(device)
    us: dict[tuple[str, str], list[float]] = {}
    for mode in ("warm", "cold") if on_gpu else ("warm",):
        for _ in range(rounds):
            for name, call in variants.items():
                if flush is not None and mode == "cold":
                    flush.zero_()
                us.setdefault((name, f"{how}_{mode}"), []).append(together_us(call, device, meet))
    return us


def _error(case: RankCase, name: str) -> str | None:
    """What is wrong with a variant on this rank. An operator that these GPUs cannot run is no fault of ours."""
    for tensor in case.outputs:
        tensor.fill_(torch.nan)
    try:
        with poisoned():
            result = case.variants[name]()
    except RuntimeError as error:
        if not name.startswith("symm_mem."):
            raise
        return f"{UNABLE} {str(error).strip().splitlines()[0]}"
    return _wrong(case, result)


def _wrong(case: RankCase, result: Tensor) -> str | None:
    """How a result differs, or None."""
    try:
        torch.testing.assert_close(result, case.expected, rtol=case.tolerance, atol=case.tolerance)
    except AssertionError as error:
        return str(error).strip().splitlines()[0]
    return None


def on_all_ranks(error: dict[str, str | None]) -> dict[str, str | None]:
    """The first rank's error of each variant."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, error)
    return {name: next((errors[name] for errors in told if errors[name]), None) for name in error}


def _keep(results: list[Tensor], call: Callable[[], Tensor]) -> None:
    results.append(call())
