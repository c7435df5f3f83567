"""Which GPUs of this machine NVLink joins, by NVML (nvidia-ml-py): a preflight says it, since PCIe peers are far slower."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import combinations
from typing import Any


def nvlink_text(uuids: Sequence[str], nvml: Any = None) -> str:
    """For GPUs of these UUIDs: "NVLink between all pairs", "NVLink between 4 of 6 pairs (not 0-2, 1-3: ...)", or why it
    is not known. nvml: the module pynvml, or one like it."""
    if len(uuids) < 2:
        return "one GPU, no NVLink needed"
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver: a word less, no reason to stop
        return f"NVLink not asked for ({type(error).__name__}: install nvidia-ml-py to see it)"
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
        pairs = list(combinations(range(len(uuids)), 2))
        apart = [(a, b) for a, b in pairs if not _joined(nvml, handles[a], handles[b])]
    finally:
        nvml.nvmlShutdown()
    if not apart:
        return "NVLink between all pairs"
    named = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (", ..." if len(apart) > 4 else "")
    return f"NVLink between {len(pairs) - len(apart)} of {len(pairs)} pairs (not {named}: expect PCIe times there)"


def uuids() -> list[str]:
    """Of the GPUs that this process sees."""
    import torch

    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]


def _joined(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)
