"""What a rank process does: join the group, then run one task after another until told to stop."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from .whereabouts import listen

if TYPE_CHECKING:
    from torch import Tensor

    from .transport.virtual import VirtualTransport

DONE, FAILED, PROGRESS = "done", "failed", "progress"
STOP = b""  # no pickle is empty
LOST_PEER = (  # what gloo and NCCL say, in lower case
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket",
    "gloo",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
)
GROUP_TIMEOUT = timedelta(hours=12)  # the pool watches over hangs, with its own shorter limit


@dataclass(eq=False)
class RankContext:
    """What a task is given: who it is, what it may keep between tasks, and how to say that it gets on."""

    rank: int
    ranks: int
    state: dict[str, Any] = field(default_factory=dict)  # survives from task to task: models, weights, references
    report: Callable[[int, int], None] = lambda done, total: None
    virtual: VirtualTransport | None = None  # of virtual ranks, which have no process group

    def progress(self, done: int, total: int) -> None:
        """Tell the pool that this task lives (rank 0 speaks for all)."""
        if self.rank == 0:
            self.report(done, total)

    def barrier(self) -> None:
        """Return when all ranks have come. On a GPU their work may still be queued."""
        import torch.distributed as dist

        if self.virtual is not None:
            self.virtual.barrier()
        else:
            dist.barrier()

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values into everybody's CPU tensor of the same shape."""
        import torch.distributed as dist

        if self.virtual is None:
            dist.broadcast(tensor, src=0)
        else:
            tensor.copy_(self.virtual.gather_objects(tensor.clone())[0])


def work(rank: int, ranks: int, pipe: Connection, scratch: str, folder: str, environment: dict[str, str]) -> None:
    """Body of one started rank. environment: the caller's, which the server that forks ranks may not have seen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the ranks
    _end_with_parent(scratch)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = scratch  # buffers shared between ranks go where the pool cleans up
    os.chdir(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # plug-ins in the user's working directory
    try:
        join_local_group(rank, ranks, os.path.join(scratch, "rendezvous"))
        pipe.send((DONE, listen()))
    except BaseException as error:
        _send_failure(pipe, error)
        return
    context = RankContext(rank, ranks, report=lambda done, total: pipe.send((PROGRESS, (done, total))))
    while True:
        try:
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        if payload == STOP:
            break
        try:
            function, arguments = pickle.loads(payload)
            pipe.send((DONE, function(context, *arguments)))
        except BaseException as error:
            _send_failure(pipe, error)
            with contextlib.suppress(EOFError, OSError):
                pipe.recv_bytes()  # ending now would break peers' connections and hide the cause: wait to be ended
            break
    os._exit(0)  # skips the tear-down of gloo, which may wait for peers


def _pin(rank: int, ranks: int) -> None:
    """Keep this rank on its share of the cores: rank r on core r modulo cores. Left to itself, the scheduler settles on
    another spread of ranks over cores in every pool, and exchanges take up to twice as long in one as in the next."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[rank::ranks] or {cores[rank % len(cores)]})


def join_local_group(rank: int, ranks: int, rendezvous: str) -> None:
    """Join the gloo group that meets through a file on this machine."""
    import psutil
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _pin(rank, ranks)
    loopback = next((name for name in ("lo", "lo0") if name in psutil.net_if_addrs()), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # a host name without an address would stop gloo
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group(
        backends(), init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
    )


def backends() -> str:
    """gloo for tensors on the CPU; NCCL for those on GPUs, where there are any."""
    import torch
    import torch.distributed as dist

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def is_broken_connection(error: BaseException) -> bool:
    """Whether an exception only says that a peer went away."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(sign in text for sign in LOST_PEER)


def _send_failure(pipe: Connection, error: BaseException) -> None:
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception whose arguments cannot travel
        error = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        pipe.send((FAILED, (error, text, is_broken_connection(error))))
    except OSError:
        os._exit(1)


def _end_with_parent(scratch: str) -> None:
    """End this process when its parent dies, even from inside a collective that will never return."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
