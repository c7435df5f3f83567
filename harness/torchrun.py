"""The ranks that torchrun started: rank 0 drives, the others follow. Same interface as RankPool."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

from semmoe.errors import UserError

from .whereabouts import listen, stacks_of, told
from .worker import GROUP_TIMEOUT, RankContext, backends, is_broken_connection

Listeners = dict[int, tuple[int, int]]  # ranks of this machine -> (process, descriptor), see whereabouts.py


def under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def is_follower() -> bool:
    """Whether this process is a rank of torchrun that only follows."""
    return under_torchrun() and _number("RANK") != 0


def _number(name: str) -> int:
    """A whole number that torchrun puts into the environment."""
    if not (text := os.environ[name]).isdecimal():
        raise UserError(
            f"{name}='{text}' in the environment is not a whole number; torchrun sets it, unset it otherwise"
        )
    return int(text)


class TorchrunPool:
    """Rank 0's handle on the ranks of torchrun, which watches over their deaths; a hang ends in gloo's time limit."""

    opened = False  # whether this process has led the ranks

    def __init__(self, ranks: int, timeout_s: float = 120.0) -> None:
        world = _number("WORLD_SIZE")
        if world != ranks:
            raise UserError(f"torchrun gave {world} ranks, the configuration has ep_size={ranks}; make them equal")
        self.ranks = ranks
        self._context, self._control, self._listeners = _join(timeout_s)
        TorchrunPool.opened = True

    def run(
        self, function: Callable[..., Any], *arguments: Any, progress: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """As RankPool.run; an exception ends this rank, and torchrun the others."""
        import torch.distributed as dist

        self._context.report = progress or (lambda done, total: None)
        dist.broadcast_object_list([pickle.dumps((function, arguments))], src=0, group=self._control)
        results: list[Any] = [None] * self.ranks
        mine = _attended(self._context, self._listeners, function, arguments)
        dist.gather_object(mine, results, dst=0, group=self._control)
        return results

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.broadcast_object_list([None], src=0, group=self._control)
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        import torch.distributed as dist

        if details[0] is None:
            self.close()
        elif dist.is_initialized():  # the others may never listen again
            dist.destroy_process_group()


def follow(timeout_s: float = 120.0) -> None:
    """Body of every rank but 0: run what rank 0 sends until it closes. An exception names the rank and ends all."""
    import torch.distributed as dist

    context, control, listeners = _join(timeout_s)
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=control)
        if box[0] is None:
            dist.destroy_process_group()
            return
        function, arguments = pickle.loads(box[0])
        dist.gather_object(_attended(context, listeners, function, arguments), None, dst=0, group=control)


def _attended(context: RankContext, listeners: Listeners, function: Callable[..., Any], arguments: Any) -> Any:
    """function(context, *arguments). UserError that names this rank and the cause, or the rank that it lost."""
    try:
        return function(context, *arguments)
    except Exception as error:
        raise UserError(_cause(error, context, getattr(function, "__name__", str(function)), listeners)) from error


def _cause(error: Exception, context: RankContext, task: str, listeners: Listeners) -> str:
    where = f"rank {context.rank} of {context.ranks}"
    if isinstance(error, UserError):
        return f"{where}: {error}"
    text = f"{type(error).__name__}: {error}"
    if not is_broken_connection(error):
        return f"{where} failed during {task}: {text}\n{traceback.format_exc()}"
    late, places = told(stacks_of({rank: at for rank, at in listeners.items() if rank != context.rank}))
    names = ", ".join(map(str, late)) or "on another machine"
    return (
        f"{where} has no answer from rank {names} during {task}: {places or 'it cannot be asked'} ({text.splitlines()[0]}; a "
        "longer measure.timeout_s helps where the machine is only slow)"
    )


def _join(timeout_s: float) -> tuple[RankContext, Any, Listeners]:
    """(context, control group, listeners): commands may be far apart, so they wait in a group with a long limit of its own."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank >= world:
        raise UserError(f"RANK={rank} in the environment must be below WORLD_SIZE={world}; torchrun sets both")
    try:
        dist.init_process_group(backends(), timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:  # torch's DistError among them
        why = str(error).splitlines()[0]
        raise UserError(
            f"rank {rank} of {world} could not meet the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"within {timeout_s:g} s: {why}; start all ranks by one torchrun command (another --rdzv-endpoint or "
            "--master-port where the port is taken), or unset RANK"
        ) from None
    control = dist.new_group(timeout=GROUP_TIMEOUT, backend="gloo")
    here: list[Any] = [None] * world
    dist.all_gather_object(here, (socket.gethostname(), (os.getpid(), listen())), group=control)
    listeners = {other: at for other, (host, at) in enumerate(here) if host == here[rank][0]}
    return RankContext(rank, world), control, listeners
