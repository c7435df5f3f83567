"""What `transport=symmetric` needs of a machine, asked before anything is allocated."""

from __future__ import annotations

import os
from typing import Any

import torch

from semmoe.errors import UserError

INSTEAD = "use transport=shared (CPU processes of one machine) or transport=collective (any machines)"


def symmetric_problems(ranks: int, cuda: Any = torch.cuda) -> list[str]:
    """What is missing for `ranks` ranks of symmetric memory on this machine, one sentence each; empty: nothing."""
    if not cuda.is_available():
        return [f"it needs one NVIDIA GPU a rank, and torch finds none ({no_gpu_reason(cuda)})"]
    problems = []
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here != ranks:
        problems.append(f"it works within one machine, and only {here} of the {ranks} ranks run on this one")
    if cuda.device_count() < here:
        problems.append(f"{here} ranks here need a GPU each, and this machine has {cuda.device_count()}")
    pairs = [(a, b) for a in range(min(here, cuda.device_count())) for b in range(a) if not _reach(cuda, a, b)]
    if pairs:
        a, b = pairs[0]
        problems.append(
            f"GPU {a} cannot address the memory of GPU {b} ({len(pairs)} such pairs): no NVLink or PCIe peer access"
        )
    try:
        import torch.distributed._symmetric_memory as symmetric

        if not hasattr(symmetric, "rendezvous") or not hasattr(symmetric._SymmetricMemory, "get_remote_tensor"):
            raise ImportError
    except ImportError:
        problems.append(f"torch {torch.__version__} has no symmetric memory; 2.10 or newer has")
    return problems


def require_symmetric(ranks: int) -> None:
    """UserError that says everything that is missing, and what to use instead."""
    problems = symmetric_problems(ranks)
    if problems:
        raise UserError(f"transport=symmetric: {'; '.join(problems)}; {INSTEAD}")


def no_gpu_reason(cuda: Any = torch.cuda) -> str:
    """Why torch finds no GPU, in its own words: built without CUDA, no driver, or one that is too old."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        cuda.init()
    except Exception as error:
        return str(error).strip().splitlines()[0]
    return "none is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"


def _reach(cuda: Any, a: int, b: int) -> bool:
    return bool(cuda.can_device_access_peer(a, b) and cuda.can_device_access_peer(b, a))
