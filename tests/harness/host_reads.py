"""NoHostReads: fails on whatever would make the host wait for a device, or a launch depend on what it read there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor  # type: ignore[attr-defined]

READS = {
    "item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__len__bool",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "is_nonzero", "equal", "allclose",
    "tensor", "as_tensor", "from_numpy", "split_with_sizes_copy", "pin_memory", "cuda",
}  # fmt: skip
_inside_kernel = False


class HostReadError(AssertionError):
    """A read of the device, by name."""


class NoHostReads(TorchFunctionMode):
    """Around the calling thread's device work. Kernels in the interpreter may do as they like: on a GPU they are compiled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _inside_kernel:
            name = getattr(func, "__name__", str(func))
            if name in READS or (name == "repeat_interleave" and not (kwargs or {}).get("output_size")):
                raise HostReadError(f"{name} reads the device on the host")
            if name in ("__getitem__", "__setitem__", "index_put_") and any(map(_is_mask, _indices(args[1]))):
                raise HostReadError(f"{name} with a boolean mask: its size is read on the host")
            if name == "to" and any(str(a) == "cpu" for a in (*args[1:], *(kwargs or {}).values())):
                raise HostReadError("to(cpu) copies to the host")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """NoHostReads, with launches of the interpreter let through."""
    launch = GridExecutor.__call__

    def unwatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _inside_kernel
        _inside_kernel = True
        try:
            return launch(self, *args, **kwargs)
        finally:
            _inside_kernel = False

    GridExecutor.__call__ = unwatched
    try:
        with NoHostReads():
            yield
    finally:
        GridExecutor.__call__ = launch


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
