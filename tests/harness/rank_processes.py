"""Four real processes with gloo for the tests of the data plane: started once, used by every module."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from harness.pool import start_method

RANKS = 4
TIMEOUT_S = 120


class RankProcesses:
    """`run(function, *arguments)` calls a module-level function on every rank and returns the results in rank order."""

    def __init__(self, ranks: int = RANKS) -> None:
        context = start_method()
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


@functools.cache
def rank_processes(ranks: int = RANKS) -> RankProcesses:
    """The processes of this test run; ended with it."""
    processes = RankProcesses(ranks)
    atexit.register(processes.close)
    return processes


def transport_of(name: str, ranks: int) -> Any:
    """On a rank process: its transport over the first `ranks` ranks; None on the other ranks."""
    return _transport(name, ranks)


@functools.cache
def _group(ranks: int) -> Any:
    return torch.distributed.new_group(list(range(ranks)))


@functools.cache
def _transport(name: str, ranks: int) -> Any:
    from harness.transport.collective import CollectiveTransport
    from harness.transport.shared import SharedTransport

    group = _group(ranks)
    if torch.distributed.get_rank() >= ranks:
        return None
    if name == "collective":
        return CollectiveTransport(group)
    kernel_path = "torch" if name == "shared" else "triton"
    fused_blocks = 2 if name == "shared_fused" else 0
    return SharedTransport(group, stage_bytes=4 << 20, timeout_s=30, kernel_path=kernel_path, fused_blocks=fused_blocks)


def _serve(rank: int, ranks: int, store: str, pipe: Any) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
