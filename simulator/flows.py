"""Flow-level network under simpy: transfers share links max-min fairly, and rates change when one starts or ends.

The fluid counterpart of simulator/cost/collectives.py, which looks at the busiest link alone. Where links are loaded
evenly both say the same; where many send to one (incast) or a shared uplink is too thin, transfers hold each other up in
turn, and the last one ends later than the busiest link alone would need.

    env = simpy.Environment(); network = FlowNetwork(env, graph)
    done = network.send(("rank", 0), ("rank", 1), 1e6)       an event; env.run(done) -> env.now in microseconds

Worked example, ports of 1 GB/s: 0 -> 2 and 1 -> 2 of 1 MB each share port 2 and take 2,000 us; 1 -> 3 of 1 MB beside
them shares port 1 with 1 -> 2: both run at 500 MB/s, and so does 0 -> 2.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx
import numba
import numpy as np
import simpy
from numpy.typing import NDArray

from .topology import paths_from

Float = NDArray[np.float64]
SMALLEST = 1e-6  # bytes that count as nothing: what rounding leaves of a finished flow


@dataclass(eq=False)
class _Flow:
    links: list[int]
    left_bytes: float
    done: simpy.Event
    rate: float = 0.0  # bytes per microsecond


@dataclass(eq=False)
class FlowNetwork:
    """Links of a directed graph with `gbps` on every edge; flows take a shortest path (topology.paths_from). Time is in
    microseconds."""

    env: simpy.Environment
    graph: nx.DiGraph
    _flows: list[_Flow] = field(default_factory=list)
    _settled_us: float = 0.0
    _generation: int = 0

    def __post_init__(self) -> None:
        self._index = {edge: i for i, edge in enumerate(self.graph.edges)}
        self._capacity = np.array([gbps * 1e3 for *_, gbps in self.graph.edges(data="gbps")])
        self._paths: dict[Hashable, dict[Any, list[Any]]] = {}
        self.bytes_E = np.zeros(len(self._capacity))  # carried so far by every link, in order of graph.edges

    def path(self, source: Hashable, target: Hashable) -> list[int]:
        """Links from source to target. networkx.NetworkXNoPath: there is no way."""
        if source not in self._paths:
            self._paths[source] = paths_from(self.graph, source)
        if target not in self._paths[source]:
            raise nx.NetworkXNoPath(f"no path from {source} to {target}")
        return [self._index[edge] for edge in pairwise(self._paths[source][target])]

    def send(self, source: Hashable, target: Hashable, size_bytes: float) -> simpy.Event:
        """Start a transfer now; the event triggers when its last byte is there."""
        flow = _Flow(self.path(source, target), float(size_bytes), self.env.event())
        if flow.left_bytes <= SMALLEST or not flow.links:
            flow.done.succeed()
            return flow.done
        self._settle()
        self._flows.append(flow)
        self._reschedule()
        return flow.done

    def _settle(self) -> None:
        """Move every flow on to the present at the rates that held until now."""
        passed = self.env.now - self._settled_us
        self._settled_us = self.env.now
        for flow in self._flows:
            moved = min(flow.rate * passed, flow.left_bytes)
            flow.left_bytes -= moved
            self.bytes_E[flow.links] += moved

    def _reschedule(self) -> None:
        """Share the links anew once all starts and ends of this instant are known, and wait for the next end."""
        self._generation += 1
        self.env.process(self._until_next_end(self._generation))

    def _until_next_end(self, generation: int) -> Any:
        yield self.env.timeout(0)
        if generation != self._generation or not self._flows:
            return
        longest = max(len(flow.links) for flow in self._flows)
        links_FP = np.full((len(self._flows), longest), -1, dtype=np.int64)
        for row, flow in zip(links_FP, self._flows, strict=True):
            row[: len(flow.links)] = flow.links
        for flow, rate in zip(self._flows, max_min_rates(links_FP, self._capacity), strict=True):
            flow.rate = float(rate)
        yield self.env.timeout(min(flow.left_bytes / flow.rate for flow in self._flows))
        if generation != self._generation:
            return
        self._settle()
        ended = [flow for flow in self._flows if flow.left_bytes <= SMALLEST + 1e-9 * flow.rate]
        self._flows = [flow for flow in self._flows if flow not in ended]
        for flow in ended:
            flow.done.succeed()
        self._reschedule()


@numba.njit(cache=True)
def max_min_rates(links_FP, capacity_E):  # type: ignore[no-untyped-def]
    """Max-min fair rates by progressive filling: the link with the least room per flow fixes its flows' rate, and so on.

    links_FP[f]: links of flow f, -1 pads. Rates have the unit of the capacities; a flow without links gets 0.
    """
    flows, most = links_FP.shape
    rate = np.zeros(flows)
    fixed = np.zeros(flows, dtype=np.bool_)
    room = capacity_E.copy()
    users = np.zeros(len(room), dtype=np.int64)
    for f in range(flows):
        for p in range(most):
            if links_FP[f, p] >= 0:
                users[links_FP[f, p]] += 1
    while True:
        tightest, share = -1, np.inf
        for e in range(len(room)):
            if users[e] > 0 and room[e] / users[e] < share:
                tightest, share = e, room[e] / users[e]
        if tightest < 0:
            return rate
        for f in range(flows):
            if fixed[f]:
                continue
            crosses = False
            for p in range(most):
                crosses = crosses or links_FP[f, p] == tightest
            if crosses:
                fixed[f] = True
                rate[f] = share
                for p in range(most):
                    if links_FP[f, p] >= 0:
                        room[links_FP[f, p]] = max(room[links_FP[f, p]] - share, 0.0)
                        users[links_FP[f, p]] -= 1


def exchange_us(graph: nx.DiGraph, bytes_GG: Float) -> Float:
    """When each pair's bytes have arrived, [G, G] microseconds, if all ranks start to send to all at once."""
    env = simpy.Environment()
    network = FlowNetwork(env, graph)
    arrived = np.zeros(bytes_GG.shape)

    def watch(s: int, d: int, done: simpy.Event) -> Any:
        yield done
        arrived[s, d] = env.now

    for s, d in zip(*np.nonzero(bytes_GG), strict=True):
        if s != d:
            env.process(watch(int(s), int(d), network.send(("rank", int(s)), ("rank", int(d)), float(bytes_GG[s, d]))))
    env.run()
    return arrived


def busiest_link_us(graph: nx.DiGraph, bytes_GG: Float) -> float:
    """What the busiest link alone needs: the bottleneck fidelity's answer, without its start-up time."""
    network = FlowNetwork(simpy.Environment(), graph)
    load = np.zeros(len(network._capacity))
    for s, d in zip(*np.nonzero(bytes_GG), strict=True):
        if s != d:
            load[network.path(("rank", int(s)), ("rank", int(d)))] += bytes_GG[s, d]
    return float((load / network._capacity).max(initial=0.0))
