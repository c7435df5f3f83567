"""Times of DeepEP's normal dispatch and combine, by a law fitted to its measured rows (what prices a2a_dedup on GPUs).

    time = floor + doubling * log2(nodes) + row_bytes * row_ns_per_byte + tokens * token_us / sms + transfer
    transfer = (link^4 + sm^4 + nic^4)^(1/4)
    link = port / link_gbps     sm = port / (sms * sm_gbps)     nic = largest NIC load / nic_gbps

port: bytes that the busiest rank sends or receives inside its node, one copy for each distinct rank that a token needs,
and what it passes on for other nodes; tokens: those of the busiest rank, each of which the sender looks at once for every
destination; row_bytes: of one row, since a longer row takes longer through the pipe. An SM copies about 18 GB/s, so that at
the 20 SMs which DeepEP and the engines take by default the SMs are as narrow as NVLink, and faster links help little.

Measured with even routes, sizes known beforehand and FP8 rows on the way out; how SMs share uneven rows is unmeasured
("skew_unvalidated"), and so is a layout whose sizes the host has to wait for. Fitted figures: ClusterSpec.deepep["normal"],
made by `python -m simulator.presets`; laws and fit against the data: simulator/validation/deepep_law.py.
Worked example, H100, EP8, hidden 7168, top-8 of 256, 128 tokens a rank: 5.31 distinct ranks a token, 4.65 of them others;
dispatch 26 + 1 + 3 us and 4.4 MB at 322 GB/s: 43 us (measured 50).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError
from semmoe.specs import ClusterSpec

from .low_latency import LowLatencyTable

Float = NDArray[np.float64]
NORM = 4.0  # how sharply the narrowest of links, SMs and NICs rules; 2 fits the rows of two and four nodes worse
OPS = ("dispatch", "combine")
KEYS = ("sms", "ranks_per_node", "nodes", "node", "between")


@dataclass(frozen=True)
class DeepEPLaw:
    """Constants of one operation; token_us on one SM, doubling_us: for each doubling of the nodes. A bandwidth of inf is no
    limit, and so are the others at 0. Bytes and times [L], or single numbers."""

    floor_us: float
    link_gbps: float
    sm_gbps: float = inf
    token_us: float = 0.0
    row_ns_per_byte: float = 0.0
    doubling_us: float = 0.0

    def time_us(
        self,
        port_bytes: Float | float,
        row_bytes: Float | float,
        tokens: Float | float,
        sms: Float | float = 1.0,
        nic_us: Float | float | None = None,
        nodes: Float | float = 1.0,
    ) -> Float:
        """nic_us: what the busiest NIC alone needs; None inside a node."""
        us_per_byte = (self.link_gbps**-NORM + (self.sm_gbps * sms) ** -NORM) ** (1 / NORM) / 1e3
        transfer = port_bytes * us_per_byte
        if nic_us is not None:
            transfer = (transfer**NORM + nic_us**NORM) ** (1 / NORM)
        fixed = self.floor_us + self.doubling_us * np.log2(nodes) + row_bytes * self.row_ns_per_byte / 1e3
        return np.asarray(fixed + tokens * self.token_us / sms + transfer, dtype=np.float64)


class NormalMode:
    """Normal dispatch and combine of cluster.deepep["normal"] over `nodes` nodes of `ranks_per_node` ranks.

    sms: streaming multiprocessors that a kernel takes; node, between: constants of both operations inside a node and over
    several (`from`: the machine whose rows they were fitted to, where it is another one); ranks_per_node, nodes: the
    most that was measured. `marks`: words of provenance.
    """

    def __init__(self, cluster: ClusterSpec, ranks_per_node: int, nodes: int) -> None:
        raw, where = cluster.deepep["normal"], f"cluster {cluster.name}: deepep.normal"
        _check(raw, KEYS, where)
        block = "node" if nodes == 1 else "between"
        _check(raw[block], OPS, f"{where}.{block}")
        known = {key: _number(raw[key], f"{where}.{key}") for key in ("sms", "ranks_per_node", "nodes")}
        self.sms, self.nodes, self.nic_gbps = known["sms"], nodes, cluster.nic_bundle_gbps
        if not self.sms > 0:
            raise UserError(f"{where}: sms={raw['sms']} must be positive (DeepEP's default is 20)")
        self._laws = {op: _law(raw[block][op], f"{where}.{block}.{op}") for op in OPS}
        self.marks = {"fitted"}
        if "from" in raw[block]:
            self.marks.add("transferred")
        if ranks_per_node != known["ranks_per_node"] or nodes > known["nodes"]:
            self.marks.add("extrapolated")

    def time_us(self, op: str, port_bytes: Float, nic_bytes: Float, row_bytes: float, tokens_L: Float) -> Float:
        """Microseconds per layer of "dispatch" or "combine"."""
        nic_us = nic_bytes / (1e3 * self.nic_gbps) if self.nodes > 1 else None
        return self._laws[op].time_us(port_bytes, row_bytes, tokens_L, self.sms, nic_us, self.nodes)


def library_of(
    cluster: ClusterSpec, dispatcher: str | None, ranks: int, ranks_per_node: int, nodes: int
) -> NormalMode | LowLatencyTable | None:
    """What prices dispatch and combine of a measured dispatch library; None: curves of collectives do.

    A curve that a calibration measured under the dispatcher's own name comes first.
    """
    if any(curve.op in (f"dispatch.{dispatcher}", f"combine.{dispatcher}") for curve in cluster.curves):
        return None
    if dispatcher == "low_latency" and nodes == 1:
        return LowLatencyTable.of(cluster, ranks)
    if dispatcher == "a2a_dedup" and "normal" in cluster.deepep and ranks > 1:
        return NormalMode(cluster, ranks_per_node, nodes)
    return None


def _law(raw: Mapping[str, Any], where: str) -> DeepEPLaw:
    known = [f.name for f in fields(DeepEPLaw)]
    _check(raw, known[:2], where)
    unknown = [key for key in raw if key not in known]
    if unknown:
        raise UserError(f"{where}: unknown {', '.join(unknown)}; keys are {', '.join(known)}")
    return DeepEPLaw(**{key: _number(value, f"{where}.{key}") for key, value in raw.items()})


def _check(raw: object, keys: Any, where: str) -> None:
    missing = list(keys) if not isinstance(raw, Mapping) else [key for key in keys if key not in raw]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)} (python -m simulator.presets writes them)")


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{where}={value!r} is no number") from None
