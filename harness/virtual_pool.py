"""VirtualPool: the ranks of `transport=virtual`, threads of this process. Same interface as RankPool.

For checks and counts on one GPU or CPU; what it times is one device doing all ranks' work, and no link.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Self

import torch

from semmoe.errors import UserError

from .transport.choose import rank_device
from .transport.virtual import VirtualTransport, run_virtual
from .worker import RankContext


class VirtualPool:
    """`ranks` threads; each keeps its context from task to task."""

    def __init__(self, ranks: int, timeout_s: float = 120.0) -> None:
        if ranks < 1:
            raise UserError(f"ranks={ranks} must be at least 1")
        self.ranks, self.timeout_s = ranks, timeout_s
        self._contexts = [RankContext(rank, ranks) for rank in range(ranks)]
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)

    def run(
        self, function: Callable[..., Any], *arguments: Any, progress: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """As RankPool.run. Every rank gets its own copy of the arguments, as a process would."""
        payload, device = pickle.dumps(arguments), rank_device("virtual", self.ranks)

        def body(transport: VirtualTransport) -> Any:
            context = self._contexts[transport.rank]
            transport.device, context.virtual = device, transport
            context.report = progress or (lambda done, total: None)
            try:
                return function(context, *pickle.loads(payload))
            except UserError as error:
                raise UserError(f"rank {transport.rank} of {self.ranks}: {error}") from error

        return run_virtual(self.ranks, body, timeout_s=self.timeout_s)

    def close(self) -> None:
        self._contexts = []
        torch.set_num_threads(self._threads_before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
