"""RankPool: real rank processes that run module-level functions together, and end together.

    with open_pool(4) as pool:
        results = pool.run(function, *arguments)      # function(context, *arguments) on every rank -> [result per rank]

One pool serves a whole sweep. A rank that dies, raises or hangs ends all of them, and one error names it and the cause.
The ranks meet through a file, never through a fixed port, so nothing on the machine can be in their way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, Self

from semmoe.errors import UserError

from .scratch import Scratch
from .whereabouts import stacks_of, told
from .worker import DONE, FAILED, PROGRESS, STOP, work

START_TIMEOUT_S = 120.0  # importing torch on a busy machine
GRACE_S = 1.5  # a peer's broken connection is often reported before its cause
Progress = Callable[[int, int], None]


class RankError(UserError):
    """A rank died, raised or hung. `rank` says which one."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Pool(Protocol):
    """Ranks that can run a function together."""

    ranks: int

    def run(self, function: Callable[..., Any], *arguments: Any, progress: Progress | None = None) -> list[Any]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *details: object) -> None: ...


@dataclass(eq=False)
class _Child:
    process: Any
    pipe: Connection

    @property
    def exit_cause(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                return f"was killed by {name}" + (" (shared memory is full)" if name == "SIGBUS" else "")
        return f"ended with exit code {code}"


class RankPool:
    """`ranks` started processes joined in one gloo group, each with one thread.

    timeout_s: longest silence of a task; progress that a rank reports starts it anew.
    """

    def __init__(self, ranks: int, timeout_s: float = 120.0) -> None:
        if ranks < 1:
            raise UserError(f"ranks={ranks} must be at least 1")
        self.ranks, self.timeout_s = ranks, timeout_s
        context = start_method()
        # everything that ranks write (rendezvous, shared buffers) lies in one folder, which goes when the pool goes
        self._folder = Scratch()
        self._children: list[_Child] = []
        self._descriptors: list[int] = []  # by which ranks say where they are
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (rank, ranks, theirs, self._scratch, os.getcwd(), dict(os.environ))
                process = context.Process(target=work, args=arguments, name=f"rank {rank}", daemon=True)
                with _interrupts_held():
                    process.start()
                theirs.close()  # so that a dead rank's pipe reads as closed
                self._children.append(_Child(process, ours))
            self._descriptors = self._gather("start-up", START_TIMEOUT_S, None)
        except BaseException:
            self.close()
            raise

    @property
    def _scratch(self) -> str:
        """Path of the folder that the ranks share."""
        return self._folder.path

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def run(self, function: Callable[..., Any], *arguments: Any, progress: Progress | None = None) -> list[Any]:
        """`function(context, *arguments)` on every rank; results by rank. RankError ends the pool."""
        if not self._children:
            raise RuntimeError("the pool is closed")
        payload = pickle.dumps((function, arguments))
        name = getattr(function, "__name__", str(function))
        try:
            for rank, child in enumerate(self._children):
                try:
                    child.pipe.send_bytes(payload)
                except OSError:
                    child.process.join(GRACE_S)
                    raise RankError(rank, f"rank {rank} {child.exit_cause} before {name}") from None
            return self._gather(name, self.timeout_s, progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks (by force where they do not listen) and remove what they shared. May be called twice."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.pipe.send_bytes(STOP)
        for end, patience_s in ((None, 1.0), ("terminate", 1.0), ("kill", 5.0)):
            deadline = time.monotonic() + patience_s
            for child in self._children:
                if end is not None and child.process.is_alive():
                    getattr(child.process, end)()
            for child in self._children:
                child.process.join(max(deadline - time.monotonic(), 0.0))
        for child in self._children:
            child.pipe.close()
        self._children = []
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _gather(self, task: str, timeout_s: float, progress: Progress | None) -> list[Any]:
        """One result of each rank; the first sign of trouble starts a short search for its origin."""
        results: dict[int, Any] = {}
        errors: dict[int, tuple[BaseException | None, str, bool]] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.ranks:
            waiting = [r for r in range(self.ranks) if r not in results and r not in errors]
            handles: list[Any] = [self._children[r].pipe for r in waiting]
            handles += [self._children[r].process.sentinel for r in waiting]
            ready = wait(handles, max(deadline - time.monotonic(), 0.0)) if waiting else []
            if not ready:
                if errors:
                    raise self._explain(task, errors)
                raise self._hung(task, timeout_s, waiting)
            for rank in waiting:
                child = self._children[rank]
                if child.pipe not in ready and child.process.sentinel not in ready:
                    continue
                kind, body = self._receive(child)
                if kind == DONE:
                    results[rank] = body
                elif kind == FAILED:
                    errors[rank] = body
                elif kind == PROGRESS:
                    deadline = time.monotonic() + timeout_s
                    if progress is not None:
                        progress(*body)
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return [results[rank] for rank in range(self.ranks)]

    def _receive(self, child: _Child) -> tuple[str, Any]:
        """Its next message; a closed pipe or an ended process reads as a failure without an exception."""
        try:
            if child.pipe.poll():
                kind, body = child.pipe.recv()
                return kind, body
        except (EOFError, OSError):
            pass
        child.process.join(GRACE_S)
        return FAILED, (None, child.exit_cause, False)

    def _explain(self, task: str, errors: dict[int, tuple[BaseException | None, str, bool]]) -> RankError:
        """The error of the rank where it began: a death first, then an exception, broken connections last."""

        def doubt(rank: int) -> tuple[int, int]:
            exception, _, broken_connection = errors[rank]
            return (0 if exception is None else 2 if broken_connection else 1), rank

        rank = min(errors, key=doubt)
        exception, text, _ = errors[rank]
        if exception is None:
            error = RankError(rank, f"rank {rank} of {self.ranks} {text} during {task}; all ranks were ended")
        elif isinstance(exception, UserError):
            error = RankError(rank, f"rank {rank} of {self.ranks}: {exception}")
        else:
            summary = f"{type(exception).__name__}: {exception}"
            error = RankError(rank, f"rank {rank} of {self.ranks} failed during {task}: {summary}\n{text}")
        return error

    def _hung(self, task: str, timeout_s: float, waiting: list[int]) -> RankError:
        late, places = waiting, ""
        if self._descriptors:
            pids = self.pids
            late, places = told(stacks_of({rank: (pids[rank], self._descriptors[rank]) for rank in waiting}))
        return RankError(
            late[0],
            f"no answer from rank {', '.join(map(str, late))} of {self.ranks} within {timeout_s:g} s during {task}"
            f"{places and ': '}{places}; all ranks were ended (a longer measure.timeout_s helps where the machine is only "
            "slow)",
        )


def start_method() -> Any:
    """Ranks are forked from one server process that has imported what they need: torch is imported once, not by every
    rank, and the second pool of a process starts at once. Where there is no such server, ranks are spawned."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "harness.measure"])
    resource_tracker.ensure_running()  # its start would let Ctrl-C through again
    with _interrupts_held():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits in this process, and never reaches a rank that is started meanwhile: the mask is inherited."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def open_pool(ranks: int, timeout_s: float = 120.0, virtual: bool = False) -> Pool:
    """A pool of started processes; under torchrun, the given ones (the caller is its rank 0). virtual: of threads."""
    from .torchrun import TorchrunPool, under_torchrun

    if virtual:
        from .virtual_pool import VirtualPool

        return VirtualPool(ranks, timeout_s)
    return TorchrunPool(ranks, timeout_s) if under_torchrun() else RankPool(ranks, timeout_s)
