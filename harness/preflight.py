"""Preflight: what a run needs of its machines, asked on every rank before anything is measured.

    needs_of(run)      bytes and calls that one rank of this run needs
    look(context, ...) what one rank finds where it runs
    problems(...)      one sentence each for what does not fit; nothing else is said when there are none

GPUs: peer access, NVLink, symmetric memory, NCCL, free memory for weights, replicas and buffers. CPUs: main memory, shared
memory, a port on this machine.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from semmoe.errors import UserError
from semmoe.run import Run
from semmoe.specs import DTYPE_BYTES

from .blocks.memory import block_bytes
from .device.fixed import largest_sizes, total_bytes
from .nvlink import nvlink_text, uuids
from .pool import Pool
from .stack import max_home_tokens
from .transport.choose import STAGE_BYTES, rank_device
from .transport.peer_memory import region_bytes
from .transport.staged import ARENA_BYTES, stage_bytes_for
from .transport.symmetric_checks import symmetric_problems
from .worker import RankContext

GIB = 2**30
FOLDERS = ("/dev/shm", tempfile.gettempdir())


@dataclass(frozen=True)
class Needs:
    """Of one rank: weights of its slots (replicas included) and of whole blocks, KV caches too; a reference layer that the
    check builds (rank 0 only, where its ranks compute), and the region of peer memory (peer transports only)."""

    transport: str
    weights_bytes: int
    reference_bytes: int
    region_bytes: int


@dataclass(frozen=True)
class Found:
    """What one rank sees. device_free_bytes: of its GPU; None on a CPU."""

    rank: int
    host: str
    device: str
    memory_free_bytes: int
    device_free_bytes: int | None
    shared_free_bytes: int
    nccl: bool
    port_error: str | None
    symmetric: tuple[str, ...]
    nvlink: str = ""  # of the whole machine, said by the rank of its first GPU


def needs_of(run: Run) -> Needs:
    """What each rank of this run must hold. Pure arithmetic on the configuration."""
    model, spec, placement = run.model, run.spec, run.fitted.placement
    expert = 3 * model.hidden * model.expert_ffn
    width = DTYPE_BYTES[spec.activation_dtype]
    slots = placement.num_layers * placement.slots_per_rank
    name = str(run.cfg["transport"]["name"])
    most = max_home_tokens(run)
    staged = max(stage_bytes_for(spec, most * run.ep_size, run.ep_size, most), STAGE_BYTES)
    captured = name == "symmetric" and run.kind == "batches" and run.cfg["measure"]["cuda_graph"] != "off"
    fixed = total_bytes(largest_sizes(spec, run.ep_size, most)) if captured else 0
    blocks, reference_block = block_bytes(run) if run.scope == "full_model" and run.kind == "batches" else (0, 0)
    return Needs(
        name,
        int(slots * expert * width) + blocks,
        int(model.num_experts * expert * (width + 4)) + reference_block,
        region_bytes(staged, ARENA_BYTES + fixed) if name in ("shared", "symmetric") else 0,
    )


def look(context: RankContext, transport: str) -> Found:
    """Task of every rank."""
    device = rank_device(transport, context.ranks)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)  # else every rank's questions open a context on the first GPU
    return Found(
        context.rank,
        socket.gethostname(),
        torch.cuda.get_device_name(device) if on_gpu else "CPU",
        psutil.virtual_memory().available,
        torch.cuda.mem_get_info(device)[0] if on_gpu else None,
        max(_free(folder) for folder in FOLDERS),
        dist.is_nccl_available(),
        _port_error(),
        tuple(symmetric_problems(context.ranks)) if transport == "symmetric" else (),
        nvlink_text(uuids()) if on_gpu and not device.index else "",
    )


def problems(found: Sequence[Found], needs: Needs) -> list[str]:
    """What does not fit, each with the rank and host that it was found on."""
    said = [f"rank {f.rank} on {f.host}: transport=symmetric: {text}" for f in found for text in f.symmetric]
    said += [f"rank {f.rank} on {f.host}: no port can be opened: {f.port_error}" for f in found if f.port_error]
    hosts = Counter(f.host for f in found)
    if needs.transport in ("shared", "symmetric") and len(hosts) > 1:
        said.append(f"transport={needs.transport} works within one machine, ranks run on {len(hosts)}: use collective")
    for f in found:
        here = hosts[f.host] if f.rank == min(o.rank for o in found if o.host == f.host) else 0  # said once a host
        if f.device_free_bytes is not None:
            virtual = needs.transport == "virtual"
            if virtual and not here:
                continue
            ranks, what = (here, f"{here} virtual ranks") if virtual else (1, f"rank {f.rank}")
            wanted = ranks * needs.weights_bytes + needs.region_bytes + (needs.reference_bytes if f.rank == 0 else 0)
            said += _short(f"{what} on {f.host}, GPU memory", wanted, f.device_free_bytes)
            if not f.nccl and not virtual:
                said.append(f"rank {f.rank} on {f.host}: this torch has no NCCL, which GPUs need between them")
        elif here:
            wanted = here * needs.weights_bytes + needs.reference_bytes
            said += _short(f"{f.host}, main memory of {here} ranks", wanted, f.memory_free_bytes)
            if needs.transport == "shared":
                said += _short(
                    f"{f.host}, shared memory of {here} ranks", here * needs.region_bytes, f.shared_free_bytes
                )
    return said


def preflight(pool: Pool, runs: Sequence[Run]) -> str:
    """One line about what was found for the neediest of these runs of one pool. UserError with every problem."""
    needs = max((needs_of(run) for run in runs), key=lambda n: n.weights_bytes + n.region_bytes)
    found: list[Found] = pool.run(look, needs.transport)
    wrong = problems(found, needs)
    if wrong:
        raise UserError("preflight: " + "; ".join(wrong))
    hosts, devices = sorted({f.host for f in found}), sorted({f.device for f in found})
    free = min(f.memory_free_bytes if f.device_free_bytes is None else f.device_free_bytes for f in found)
    each = needs.weights_bytes + needs.region_bytes
    links = "".join(f"; {f.host}: {f.nvlink}" for f in found if f.nvlink)
    return (
        f"preflight: {pool.ranks} ranks on {len(hosts)} machine(s), {', '.join(devices)}, transport {needs.transport}; "
        f"a rank needs {each / GIB:.2f} GiB for weights and buffers, {free / GIB:.1f} GiB are free{links}"
    )


def _short(what: str, wanted: int, free: int) -> list[str]:
    if wanted <= free:
        return []
    return [
        f"{what}: {wanted / GIB:.2f} GiB are needed, {free / GIB:.2f} GiB are free; use a smaller model_scale, fewer slots "
        "or tokens, a shorter workload.context_tokens, or more ranks"
    ]


def _free(folder: str) -> int:
    try:
        return psutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    except OSError:
        return 0


def _port_error() -> str | None:
    """Whether a socket of this machine can be opened and reached, as gloo does."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return None
    except OSError as error:
        return str(error)
