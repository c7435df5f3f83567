"""How fast the exchanges of a measured run were: bytes that the counters saw over the time of their phase, beside what one
large copy between two GPUs reaches.

Bus bandwidth as nccl-tests counts it: of an exchange the bytes that cross a port one way, of an all-reduce 2 (G - 1) / G of its
buffer. The ports of an uneven exchange are not equal: the busiest one counts, of each step and layer. Payload only, as in the
columns of bytes. Worked example, 4 ranks: rank 0 sends 30 rows of 1,000 bytes and receives 90, the others less: 90,000 bytes in
1 ms are 0.09 GB/s.

Between CPU processes or virtual ranks nothing crosses a link: the same quotient says how fast an exchange was and no share of a
link follows from it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from semmoe.results import EXCHANGES
from semmoe.traffic import Traffic
from semmoe.traffic.collective import Collective

from .device.clock import device_ns, devices_meet
from .pool import Pool
from .worker import RankContext

PHASES = {"reduce_scatter": "srs", "all_gather": "sag", "expert_ids": "sag"}  # of operations that are named otherwise
PEAK_BYTES = 256 << 20
COPIES = 20


class PortMeter:
    """Bytes of the busiest port, by phase, and bytes that stayed on their rank, over all steps and layers."""

    def __init__(self) -> None:
        self.port_bytes: dict[str, float] = defaultdict(float)
        self.local_bytes = 0.0
        self.layers = 0

    def add(self, traffic: Traffic) -> None:
        """Count one step."""
        self.layers += traffic.num_layers
        reduced = 0
        for collective in traffic.collectives:
            phase = PHASES.get(collective.op, collective.op)
            if collective.op == "all_reduce":  # the first one stands where SRS does
                phase, reduced = ("sag" if reduced else "srs"), reduced + 1
            self.port_bytes[phase] += port_bytes(collective, traffic.ep_size)
            if collective.rows_LGG is not None:
                self.local_bytes += float(collective.pair_sums.local_LG.sum() * collective.row_bytes)

    def columns(self, row: Mapping[str, Any], link_gbps: float | None, link: str) -> dict[str, Any]:
        """Columns of a row that has those of its phases."""
        columns: dict[str, Any] = {"local_bytes": self.local_bytes, "link": link, "link_peak_gbps": link_gbps}
        for phase in EXCHANGES:
            took_ms = row.get(f"{phase}_ms")
            if phase not in self.port_bytes or not took_ms:
                continue  # no such exchange, or inside a CUDA graph, where phases are not told apart
            gbps = self.port_bytes[phase] / self.layers / took_ms / 1e6
            columns |= {f"{phase}_busbw_gbps": gbps, f"{phase}_link_share": gbps / link_gbps if link_gbps else None}
        return columns


def port_bytes(collective: Collective, ranks: int) -> float:
    """Bytes across the busiest port, one way, summed over layers."""
    if collective.buffer_rows_L is not None:
        return float(collective.buffer_rows_L.sum() * collective.row_bytes * 2 * (ranks - 1) / ranks)
    sums = collective.pair_sums
    return float(np.maximum(sums.sent_LG, sums.received_LG).max(axis=1).sum() * collective.row_bytes)


def link_of(pool: Pool, where: str) -> tuple[float | None, str]:
    """(GB/s of one large copy between two GPUs, what it is) for the rows of a pool; None where ranks are no GPUs. where: what
    the ranks are."""
    if where != "GPUs":
        return None, f"none: {where}, no link speed follows"
    if pool.ranks == 1:
        return None, "none: one GPU"
    gbps = min(pool.run(peer_copy_gbps, PEAK_BYTES))
    return gbps, f"copy of {PEAK_BYTES >> 20} MiB to the next GPU of the machine, all at once, slowest rank"


def peer_copy_gbps(context: RankContext, size_bytes: int) -> float:
    """Task of every rank: bytes a second that one large copy to the next GPU moves, while all others copy too."""
    here, local = (
        int(os.environ.get("LOCAL_RANK", context.rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", context.ranks)),
    )
    device = torch.device("cuda", here)
    torch.cuda.set_device(device)
    a = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    b = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{(here + 1) % local}")
    meet = devices_meet(device)
    ns = [device_ns(lambda: b.copy_(a), meet) for _ in range(COPIES)]
    return size_bytes / float(np.median(ns[2:]))
