"""Which transport a configuration names, on which device its ranks work, and with which kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from semmoe.errors import UserError, nearest

from .base import Transport

TRANSPORTS = ("collective", "shared", "symmetric", "virtual")
STAGE_BYTES = 16 << 20  # the least that peer transports reserve


def make_transport(name: str, group: Any, stage_bytes: int, kernels: str = "torch", fixed_bytes: int = 0) -> Transport:
    """A transport over a process group (None: all ranks). stage_bytes: what one operation of a rank may stage;
    fixed_bytes: what captured layers keep in its memory."""
    if name not in TRANSPORTS:
        raise UserError(f"transport '{name}'{nearest(name, TRANSPORTS)}")
    stage_bytes = max(stage_bytes, STAGE_BYTES)
    device = rank_device(name, dist.get_world_size())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if name == "shared":
        from .shared import SharedTransport

        return SharedTransport(group, stage_bytes=stage_bytes, kernel_path=kernels)
    if name == "symmetric":
        from .peer_memory import aligned
        from .staged import ARENA_BYTES
        from .symmetric import SymmetricTransport

        return SymmetricTransport(group, stage_bytes, ARENA_BYTES + aligned(fixed_bytes), kernels)
    if name == "virtual":
        raise UserError("virtual ranks live in one process; these ranks have one each")
    from .collective import CollectiveTransport

    return CollectiveTransport(group, device)


def rank_device(name: str, ranks: int) -> torch.device:
    """Where this rank computes: its own GPU where the transport works there and every rank of the machine has one, else
    the CPU. Virtual ranks share the first GPU."""
    if name == "shared" or not torch.cuda.is_available():
        return torch.device("cpu")
    if name == "virtual":
        return torch.device("cuda", 0)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here > torch.cuda.device_count():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def kernel_path(transport: Mapping[str, Any], device: torch.device) -> str:
    """Column kernel_path of a row: "torch" or "triton". UserError for what must not be timed."""
    kernels = str(transport.get("kernels", "torch"))
    if kernels == "torch":
        return kernels
    if transport["name"] == "collective":
        raise UserError("transport=collective makes library calls only; set transport.kernels=torch")
    if device.type == "cpu":
        raise UserError(
            f"transport.kernels={kernels} on a CPU is Triton's interpreter, which shows that kernels are right and nothing "
            "about time; set transport.kernels=torch, their twins in plain torch"
        )
    return kernels
