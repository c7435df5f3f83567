"""Baselines made of torch's own symmetric-memory operators, which start and end with the tensors that SRS and SAG do.

Inputs are copied into symmetric memory and results out of it, as callers of these operators have to. An operator is
offered where this torch has it and the GPUs can run it; `missing` says why not. `multimem_*` need NVLink multicast;
`_low_contention_*` work on a stream of their own, which the caller's has to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MULTICAST = ("multimem_all_reduce_", "multimem_all_gather_out")
OPERATORS = {  # what each is a baseline of
    "one_shot_all_reduce": "srs_sag",
    "two_shot_all_reduce_": "srs_sag",
    "multimem_all_reduce_": "srs_sag",
    "reduce_scatter_out": "srs",
    "_low_contention_reduce_scatter": "srs",
    "multimem_all_gather_out": "sag",
    "_low_contention_all_gather": "sag",
}


def missing(operator: str, device: torch.device, ranks: int) -> str | None:
    """Why torch.ops.symm_mem has no such operator for these ranks, or None."""
    import torch.distributed._symmetric_memory as symmetric  # registers the operators

    if not hasattr(torch.ops.symm_mem, operator):
        return f"torch {torch.__version__} has no torch.ops.symm_mem.{operator}"
    if device.type != "cuda":
        return "symmetric memory needs GPUs"
    if ranks < 2:
        return "one GPU: nothing to exchange"
    if operator in MULTICAST:
        library: Any = symmetric._SymmetricMemory
        if not library.has_multicast_support(symmetric.DeviceType.CUDA, device.index):
            return "these GPUs have no NVLink multicast"
    return None


class SymmetricOps:
    """The operators over one symmetric buffer [T, H] of every rank. Collective; `dtype` and sizes alike on all ranks.

    perm_T: tokens in rank order, equal counts; place_T: its inverse.
    """

    def __init__(
        self, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, perm_T: Tensor, place_T: Tensor
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.buffer_TH = symmetric.empty(tokens, hidden, dtype=dtype, device=device)
        group: Any = dist.group.WORLD
        symmetric.rendezvous(self.buffer_TH, group)
        self.name = str(group.group_name)
        self.ranks = dist.get_world_size()
        self.perm_T, self.place_T = perm_T, place_T

    def variant(self, operator: str, given: Tensor) -> Callable[[], Tensor]:
        """The baseline made of one operator. given: x_TH of this rank, for "sag" its own rows."""
        call = self.operator(operator)
        if OPERATORS[operator] == "srs_sag":
            return partial(self._all_reduce, call, given)
        ways = {
            "reduce_scatter_out": self._reduce_scatter,
            "_low_contention_reduce_scatter": self._reduce_scatter_new,
            "multimem_all_gather_out": self._all_gather,
            "_low_contention_all_gather": self._all_gather_new,
        }
        return partial(ways[operator], call, given)

    def operator(self, name: str) -> Any:
        return getattr(torch.ops.symm_mem, name)

    def _all_reduce(self, call: Any, x_TH: Tensor) -> Tensor:
        out_TH = call(self.buffer_TH.copy_(x_TH), "sum", self.name)
        return out_TH.clone() if out_TH.data_ptr() == self.buffer_TH.data_ptr() else out_TH

    def _ranked(self, x_TH: Tensor) -> Tensor:
        return torch.index_select(x_TH, 0, self.perm_T, out=self.buffer_TH)

    def _reduce_scatter(self, call: Any, x_TH: Tensor) -> Tensor:
        out_nH = x_TH.new_empty(len(x_TH) // self.ranks, x_TH.shape[1])
        call(self._ranked(x_TH).view(-1), self.name, False, out_nH.view(-1))  # splits flat tensors
        return out_nH

    def _reduce_scatter_new(self, call: Any, x_TH: Tensor) -> Tensor:
        return _waited(call(self._ranked(x_TH), "sum", self.name))

    def _all_gather(self, call: Any, rows_nH: Tensor) -> Tensor:
        call(rows_nH, self.name, self.buffer_TH)
        return self.buffer_TH.index_select(0, self.place_T)

    def _all_gather_new(self, call: Any, rows_nH: Tensor) -> Tensor:
        return _waited(call(rows_nH, self.name)).index_select(0, self.place_T)


def _waited(made: Tensor) -> Tensor:
    """What an operator works on until its result is waited for: read earlier, it is neither ready nor timed."""
    done: Tensor = torch.ops._c10d_functional.wait_tensor(made)
    return done
