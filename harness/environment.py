"""EnvironmentRecord: on what a figure was measured. Stands beside every measured row."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from .torchrun import under_torchrun

LIBRARIES = ("torch", "triton", "numpy", "numba")
GPU_STATE = "index,name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


def environment(ranks: int, where: str = "CPU processes") -> dict[str, Any]:
    """Machine, library versions, load, threads and command line, in names with units. where: what the ranks are."""
    load_1min, _, _ = os.getloadavg()
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(load_1min, 2),
        "command": shlex.join(sys.argv[1:]),
        "ranks": ranks,
        "threads_per_rank": 1,
        "pinned": where == "CPU processes" and not under_torchrun(),  # worker.py pins the ranks that it starts
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "mode": "eager, GPUs" if where == "GPUs" else f"eager, {where}: no link speed may be derived from them",
    }


def gpu_libraries() -> dict[str, Any]:
    """CUDA and NCCL of this torch, and how the GPUs of the machine are joined."""
    import torch

    from .nvlink import nvlink_text, uuids

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    topology = f"{torch.cuda.device_count()} GPUs, {nvlink_text(uuids())}"
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "nccl": nccl, "topology": topology}


def gpu_state() -> list[dict[str, str]]:
    """Driver, clocks, power, temperature of every GPU of the machine, in nvidia-smi's units; [] where it cannot be asked."""
    asked = ["nvidia-smi", f"--query-gpu={GPU_STATE}", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    names = GPU_STATE.split(",")
    return [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in said.splitlines() if line]


def only_core() -> int | None:
    """The core that this process is kept on; None: it may run on several."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return min(cores) if len(cores) == 1 else None


def usable_cores() -> int:
    """Cores that this process may use: the scheduler's mask, cut by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(min(cores, round(quota)), 1) if quota else cores


def _cgroup_quota() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"
