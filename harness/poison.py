"""Memory that shows when nobody wrote it. Imports torch alone, so that benchmarks of kernels need nothing of a run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_MODE = threading.Lock()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh tensors start as NaN (bytes: 255, which is NaN in every float type), so that an unwritten row shows."""
    memory: Any = torch.utils.deterministic
    with _MODE:
        mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        ours = not mode  # else another virtual rank of this process did it, and will undo it
        if ours:
            torch.set_deterministic_debug_mode(
                "warn"
            )  # use_deterministic_algorithms would import the compiler: seconds
            memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        if ours:
            torch.set_deterministic_debug_mode(mode)
            memory.fill_uninitialized_memory = fill
