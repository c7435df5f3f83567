"""From the pairs of a collective to its time (DESIGN section 6).

Inside a node of n ranks, with nccl-tests' count of bytes and curve_n the measured latency over n ranks:

    S_eq = max(largest egress, largest ingress) * n / (n - 1)        time = max(curve_n(S_eq), curve_2(2 * largest pair))

All-reduce: S_eq is the buffer. On a mesh the largest pair has one link to itself: S_eq >= n * largest pair. Between
nodes the busiest NIC or the busiest uplinks of a leaf switch count: nic_alpha + NIC load / nic_gbps, or uplink load over
their capacity (semmoe/traffic/wiring.py, ports.py); the tiers overlap, the slower one counts. A curve measured over other
numbers of ranks is read at the size with the same egress. Without a curve: alpha + bytes / bandwidth. Where a calibration
measured skewed exchanges (ClusterSpec.skew), the busiest port and the hottest pair count by its weights (law:
harness/calibration/skew.py). Without that, ranks that share cores (CPU) do each other's work: their load is
max(largest * cores / n, mean) where cores < n. Dispatch and combine of a measured library (DeepEP: low_latency,
a2a_dedup) have its own table or law instead (deepep.py); a2a_assignment is what an engine without one does.
SRS and SAG pick rows one by one, sender and receiver: a calibration measures them on shuffled tokens, beside the plain
reduce-scatter and all-gather of the same bytes, which tp_scattered and a token scheduler that keeps the order have.
Worked example: 8 ranks, each sends 1 MiB to each other: egress 7 MiB, S_eq = 8 MiB.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import METADATA_BYTES, DispatchSpec
from semmoe.errors import UserError
from semmoe.specs import ClusterSpec
from semmoe.traffic import Traffic
from semmoe.traffic.collective import Collective
from semmoe.traffic.over_ranks import most

from ..topology import Topology
from .curves import Blend, CurveSet
from .deepep import library_of
from .loads import Loads, loads_of

Float = NDArray[np.float64]
PHASE = {
    "srs": "srs",
    "reduce_scatter": "srs",
    "sag": "sag",
    "all_gather": "sag",
    "expert_ids": "sag",
    "dispatch": "dispatch",
    "combine": "combine",
}
NCCL_OP = {"srs": "reduce_scatter", "reduce_scatter": "reduce_scatter", "sag": "all_gather", "all_gather": "all_gather"}


def curve_names(op: str, spec: DispatchSpec) -> tuple[str, ...]:
    """Names under which a cluster may hold the curve of an operation, the most specific first.

    Presets hold nccl-tests' four; a calibration may add what it measured through the harness's own transport, under
    the dispatcher ("dispatch.a2a_dedup") or the transport's operation ("gather_rows", "dispatch_slots", "srs").
    """
    if op == "migration":
        return ("alltoall",)
    if op not in ("dispatch", "combine"):
        plain = NCCL_OP.get(op, op)
        return (plain, op) if spec.keeps_order else (op, plain)
    dispatcher = spec.dispatcher
    outward = op == "dispatch"
    if dispatcher == "allgather_rs":
        return (
            f"{op}.{dispatcher}",
            *(("gather_rows", "all_gather") if outward else ("reduce_rows", "reduce_scatter")),
        )
    if dispatcher == "low_latency":
        return (f"{op}.{dispatcher}", f"{op}_slots", "alltoall")
    return (f"{op}.{dispatcher}", op, "alltoall")


class CollectiveCost:
    """Times of all collectives of a Traffic over the first `ranks` ranks of a cluster.

    allow_roofline: price an operation that was neither measured nor given an alpha by bandwidth alone, instead of
    refusing. `marks` gathers the words of provenance.
    """

    needs_pairs = False

    def __init__(
        self, cluster: ClusterSpec, spec: DispatchSpec, ranks: int, slots_per_rank: int, allow_roofline: bool = False
    ) -> None:
        self.cluster, self.spec, self.ranks, self.slots_per_rank = cluster, spec, ranks, slots_per_rank
        self.allow_roofline = allow_roofline
        self.topology = Topology.of(cluster, ranks)
        self.wiring = self.topology.wiring.with_pairs() if self.needs_pairs else self.topology.wiring
        self.inner = self.wiring.ranks_per_node
        self.marks: set[str] = set()
        self._curves = CurveSet(cluster.curves)
        self._picked: dict[str, Blend | None] = {}
        self._empty_us: dict[str, float] = {}
        self._library = library_of(cluster, spec.dispatcher, ranks, self.inner, self.topology.nodes)

    def phases_us(self, traffic: Traffic) -> dict[str, Float]:
        """Microseconds per layer of "srs", "dispatch", "combine" and "sag"."""
        times: dict[str, Float] = {}
        if self.ranks == 1 or not traffic.tokens:
            return times
        reduces = 0
        for collective in self._merged(traffic):
            if collective.op == "all_reduce":
                phase, reduces = ("sag" if reduces else "srs"), reduces + 1
                time = self._all_reduce_us(collective)
            else:
                phase = PHASE[collective.op]
                time = self._pairs_us(collective, traffic)
            times[phase] = times[phase] + time if phase in times else time
        return times

    def exchange_us(self, c: Collective) -> float:
        """Microseconds of one exchange that carries no tokens (weights on the move), over all its layers."""
        none_LG = np.zeros((1, self.ranks), dtype=np.int64)
        pairs_LGG = np.zeros((1, 0, 0), dtype=np.int64)
        nothing = Traffic(none_LG, pairs_LGG, pairs_LGG, none_LG, none_LG)
        return float(self._pairs_us(c, nothing).sum())

    def _merged(self, traffic: Traffic) -> list[Collective]:
        """Expert ids travel beside the all-gather of the rows: one collective of wider rows."""
        made: list[Collective] = []
        for c in traffic.collectives:
            if c.op == "expert_ids" and made and made[-1].op in ("sag", "all_gather"):
                made[-1] = replace(made[-1], row_bytes=made[-1].row_bytes + c.row_bytes)
            else:
                made.append(c)
        return made

    def _pairs_us(self, c: Collective, traffic: Traffic) -> Float:
        loads = loads_of(c, self.wiring)
        if loads.skewed and f"{c.op}.port" not in self.cluster.skew:
            self.marks.add("skew_unvalidated")
        if self._library is not None and c.op in ("dispatch", "combine"):
            self.marks |= self._library.marks
            port, nic = loads.port_L * c.row_bytes, self._busiest_nic_L(loads) * c.row_bytes
            return self._library.time_us(c.op, port, nic, c.row_bytes, most(traffic.homes_LG))
        row_bytes = c.row_bytes + (self._metadata_row_bytes(traffic, c) if c.op == "dispatch" else 0.0)
        time = self._inside_us(c.op, loads, row_bytes, traffic)
        if self.topology.nodes > 1:
            self.marks.add("fitted")
            time = np.maximum(time, self._between_us(loads, row_bytes))
        return time

    def _between_us(self, loads: Loads, row_bytes: Float | float) -> Float:
        cluster = self.cluster
        return cluster.nic_alpha_us + self._busiest_nic_L(loads) * row_bytes / (cluster.nic_bundle_gbps * 1e3)

    def _busiest_nic_L(self, loads: Loads) -> Float:
        """Rows through the busiest NIC bundle, or as many as keep the busiest uplinks busy as long."""
        return np.maximum(loads.nic_L, loads.leaf_L * self.cluster.oversubscription)

    def _metadata_row_bytes(self, traffic: Traffic, c: Collective) -> Float | float:
        """Slot ids and gate weights, shared out over the rows of the layer that they travel with."""
        if self.spec.dispatcher == "allgather_rs":
            return float(self.spec.top_k * METADATA_BYTES)
        if not traffic.metadata_bytes:
            return 0.0
        rows_L = c.remote_bytes_L(self.ranks) / c.row_bytes
        metadata_L = traffic.remote_assignments_L() * METADATA_BYTES
        return np.divide(metadata_L, rows_L, out=np.zeros(len(rows_L)), where=rows_L > 0)

    def _inside_us(self, op: str, loads: Loads, row_bytes: Float | float, traffic: Traffic) -> Float:
        n = self.inner
        if n == 1:
            return np.zeros_like(loads.port_L)
        port = self._shared(loads, traffic, op) * row_bytes
        pair = loads.pair_L * row_bytes
        curve = self._curve(op, n)
        if curve is None:
            return self._alpha_beta_us(port, pair) + self._sizes_us(op, None)
        size = port * (n / (n - 1))
        if self.cluster.topology == "mesh":
            size = np.maximum(size, n * pair)
        time = curve.time_us(size)
        if size.max(initial=0.0) > curve.last_bytes:
            self.marks.add("extrapolated")
        if (
            n > 2
            and not self.cluster.cores
            and self.cluster.topology != "mesh"
            and f"{op}.port" not in self.cluster.skew
        ):
            two = self._curves.exact(curve_names(op, self.spec), 2)
            if two is not None:
                time = np.maximum(time, two.time_us(2 * pair))
        return time + self._sizes_us(op, curve)

    def _shared(self, loads: Loads, traffic: Traffic, op: str) -> Float:
        """Rows at the busiest port, or the load that counts where skew was measured or ranks share cores."""
        cores, n, skew = self.cluster.cores, self.inner, self.cluster.skew
        if cores and self.spec.dispatcher == "low_latency" and op in ("dispatch", "combine"):
            # the CPU stand-in of the one-sided exchange moves all of its fixed places, filled or not
            places = traffic.homes_LG.max(axis=1) * min(self.spec.top_k, self.slots_per_rank)
            return (places * (n - 1)).astype(np.float64)
        if f"{op}.port" in skew:
            beyond = np.maximum((n - 1) * loads.pair_L - loads.port_L, 0.0)
            above = loads.port_L - loads.mean_port_L
            return loads.mean_port_L + skew[f"{op}.port"] * above + skew.get(f"{op}.pair", 0.0) * beyond
        if not cores:
            return loads.port_L
        return np.maximum(loads.port_L * min(1.0, cores / n), loads.mean_port_L)

    def _sizes_us(self, op: str, curve: Blend | None) -> float:
        """Ranks tell each other how many rows come, before an all-to-all of unknown sizes: one empty exchange.

        A curve measured for the dispatcher itself holds it already.
        """
        if op != "dispatch" or self.spec.dispatcher not in ("a2a_assignment", "a2a_dedup"):
            return 0.0
        if curve is None:
            return self.cluster.alpha_us
        if op not in self._empty_us:
            self._empty_us[op] = 0.0 if curve.low.op.startswith("dispatch") else float(curve.time_us(0.0))
        return self._empty_us[op]

    def all_reduce_us(self, rows_L: NDArray[np.float64]) -> Float:
        """One all-reduce of so many activation rows, outside of any MoE layer."""
        row_bytes = self.spec.row_bytes
        return self._all_reduce_us(
            Collective("all_reduce", row_bytes, buffer_rows_L=np.asarray(rows_L, dtype=np.int64))
        )

    def _all_reduce_us(self, c: Collective) -> Float:
        assert c.buffer_rows_L is not None
        size, n, nodes = c.buffer_rows_L * c.row_bytes, self.inner, self.topology.nodes
        time: Float = np.zeros(len(size))
        if n > 1:
            curve = self._curve("all_reduce", n)
            share: Float = np.asarray(2 * (n - 1) / n * size, dtype=np.float64)
            time = self._alpha_beta_us(share, share / (n - 1)) if curve is None else curve.time_us(size)
        if nodes > 1:  # reduce-scatter inside, all-reduce of the shares between nodes, all-gather inside
            self.marks.add("fitted")
            across = 2 * (nodes - 1) / nodes * size / n * np.bincount(self.wiring.nic_G).max()
            time = time + self.cluster.nic_alpha_us + across / (self.cluster.nic_bundle_gbps * 1e3)
        return time

    def _curve(self, op: str, ranks: int) -> Blend | None:
        if op not in self._picked:
            self._picked[op] = curve = self._curves.pick(curve_names(op, self.spec), ranks)
            if curve is not None:
                self.marks |= {"interpolated", *curve.marks}
        return self._picked[op]

    def _alpha_beta_us(self, port_bytes: Float, pair_bytes: Float) -> Float:
        cluster = self.cluster
        if not cluster.alpha_us > 0:
            if not self.allow_roofline:
                held = ", ".join(self._curves.names()) or "none"
                raise UserError(
                    f"cluster {cluster.name}: no curve for the collectives of {self.spec.flow}/{self.spec.dispatcher} "
                    f"(curves held: {held}) and no alpha_us; measure them (semmoe calibrate), set alpha_us, or accept "
                    "bandwidth alone with cost.allow_roofline=true"
                )
            self.marks.add("roofline")
        else:
            self.marks.add(_first_word(cluster.provenance.get("link", cluster.provenance.get("all", "fitted"))))
        time = cluster.alpha_us + port_bytes / (cluster.link_gbps * 1e3)
        if cluster.topology == "mesh" and cluster.mesh_link_gbps:
            time = np.maximum(time, cluster.alpha_us + pair_bytes / (cluster.mesh_link_gbps * 1e3))
        return time


def _first_word(text: str) -> str:
    known = ("measured", "fitted", "assumed", "uncalibrated")
    word = text.split()[0].rstrip(":,") if text else "fitted"
    return word if word in known else "fitted"
