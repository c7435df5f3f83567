"""Counter: what one rank really moved, layer by layer; `traffic_of` turns the ranks' counts into one Traffic.

Every number comes from a split size that was passed to a collective, from the size of what arrived, from a loop or a
kernel that increments while it pulls rows, or from the group sizes given to the experts. None comes from the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from semmoe.traffic import Traffic
from semmoe.traffic.collective import Collective

Int = NDArray[np.int64]


class CountError(RuntimeError):
    """Ranks disagree about what they sent and received: a fault of the data plane, not of the user."""


@dataclass
class Operation:
    """One collective as a rank saw it: rows to and from every rank (own rank: rows that stayed), or a reduced buffer."""

    op: str
    row_bytes: float
    sent_G: list[int] | None = None
    received_G: list[int] | None = None
    buffer_rows: int | None = None


@dataclass
class LayerCounts:
    """One rank's counts of one layer. `*_sent_G[d]`: to rank d; `*_served_G[s]`: arrived from rank s.

    assignments_sent_G and pairs_sent_G stay None where the sender does not choose the receiver (allgather_rs).
    """

    homes: int = 0
    tokens: int = 0
    expert_rows: int = 0
    active_experts: int = 0
    assignments_sent_G: list[int] | None = None
    assignments_served_G: list[int] | None = None
    pairs_sent_G: list[int] | None = None
    pairs_served_G: list[int] | None = None
    metadata_sent_bytes: int = 0
    metadata_received_bytes: int = 0
    padding_bytes: int = 0
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Counter:
    """Counts of one rank since `reset`, one LayerCounts a layer. Picklable, so that a pool can gather it as it likes."""

    rank: int
    ranks: int
    layers: list[LayerCounts] = field(default_factory=list)
    enabled: bool = True

    def reset(self) -> None:
        self.layers = []

    def start_layer(self) -> None:
        if self.enabled:
            self.layers.append(LayerCounts())

    @property
    def now(self) -> LayerCounts:
        """The counts of the layer that runs; a throw-away record while counting is off or no layer has started."""
        return self.layers[-1] if self.enabled and self.layers else LayerCounts()

    def exchange(self, op: str, row_bytes: float, sent_G: Sequence[int], received_G: Sequence[int]) -> None:
        self.now.operations.append(Operation(op, float(row_bytes), list(sent_G), list(received_G)))

    def all_reduce(self, row_bytes: float, rows: int) -> None:
        self.now.operations.append(Operation("all_reduce", float(row_bytes), buffer_rows=rows))

    def metadata(self, sent_bytes: int, received_bytes: int) -> None:
        self.now.metadata_sent_bytes += sent_bytes
        self.now.metadata_received_bytes += received_bytes


class GathersObjects(Protocol):
    """The one thing that `gather_traffic` needs of a transport."""

    @property
    def counter(self) -> Counter: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


def gather_traffic(transport: GathersObjects) -> Traffic:
    """Traffic of everything counted since the last reset; collective: every rank calls it and every rank gets it."""
    return traffic_of(transport.gather_objects(transport.counter))


def traffic_of(counters: Sequence[Counter]) -> Traffic:
    """One Traffic over L layers from the counters of all ranks.

    Raises CountError, naming rank and layer, when what a rank received is not what the other sent, when experts
    multiplied another number of rows than arrived, or when the ranks ran different operations.
    """
    counters = sorted(counters, key=lambda c: c.rank)
    ranks, layers = len(counters), len(counters[0].layers)
    for c in counters:
        if len(c.layers) != layers or c.ranks != ranks:
            raise CountError(f"rank {c.rank} counted {len(c.layers)} layers of {c.ranks} ranks; rank 0 {layers}")
    table = [[c.layers[layer] for c in counters] for layer in range(layers)]
    pairs_LGG, rank_pairs_LGG = (np.zeros((layers, ranks, ranks), dtype=np.int64) for _ in range(2))
    for layer, row in enumerate(table):
        pairs_LGG[layer] = _matched("assignments", layer, row)
        rank_pairs_LGG[layer] = _matched("pairs", layer, row)
        _check_metadata(layer, row)
    rows_LG = np.array([[c.expert_rows for c in row] for row in table], dtype=np.int64).reshape(layers, ranks)
    homes_LG = np.array([[c.homes for c in row] for row in table], dtype=np.int64).reshape(layers, ranks)
    _check_expert_rows(pairs_LGG, rows_LG, table)
    return Traffic(
        homes_LG,
        pairs_LGG,
        rank_pairs_LGG,
        rows_LG,
        np.array([[c.active_experts for c in row] for row in table], dtype=np.int64).reshape(layers, ranks),
        _collectives(table),
        _tokens(homes_LG, table),
        float(sum(c.metadata_sent_bytes for row in table for c in row)),
    )


def _matched(what: str, layer: int, row: list[LayerCounts]) -> Int:
    """[s, d] as the servers saw it; compared with what the senders say, where they know."""
    served_GG = np.zeros((len(row), len(row)), dtype=np.int64)
    for d, counts in enumerate(row):
        served = getattr(counts, f"{what}_served_G")
        served_GG[:, d] = 0 if served is None else served
    for s, counts in enumerate(row):
        sent = getattr(counts, f"{what}_sent_G")
        if sent is not None:
            _compare(what, layer, s, np.asarray(sent), served_GG[s])
    return served_GG


def _compare(what: str, layer: int, sender: int, sent_G: Int, received_G: Int) -> None:
    wrong = np.flatnonzero(sent_G != received_G)
    if len(wrong):
        d = int(wrong[0])
        raise CountError(
            f"layer {layer}, {what}: rank {d} received {received_G[d]} rows from rank {sender}, which sent {sent_G[d]}"
        )


def _check_metadata(layer: int, row: list[LayerCounts]) -> None:
    sent, received = (sum(getattr(c, f"metadata_{way}_bytes") for c in row) for way in ("sent", "received"))
    if sent != received:
        raise CountError(f"layer {layer}: {received} bytes of metadata received, {sent} sent")


def _check_expert_rows(pairs_LGG: Int, rows_LG: Int, table: list[list[LayerCounts]]) -> None:
    arrived_LG = pairs_LGG.sum(axis=1)
    for layer, rank in np.argwhere(arrived_LG != rows_LG):
        if table[layer][rank].assignments_served_G is not None:  # tp_replicated has no pairs
            raise CountError(
                f"layer {layer}: experts of rank {rank} multiplied {rows_LG[layer, rank]} rows, "
                f"{arrived_LG[layer, rank]} arrived"
            )


def _tokens(homes_LG: Int, table: list[list[LayerCounts]]) -> int:
    if not table:
        return 0
    return max(int(homes_LG[0].sum()), *(c.tokens for c in table[0]), 0)


def _collectives(table: list[list[LayerCounts]]) -> tuple[Collective, ...]:
    if not table:
        return ()
    names = [o.op for o in table[0][0].operations]
    for layer, row in enumerate(table):
        for rank, counts in enumerate(row):
            got = [o.op for o in counts.operations]
            if got != names:
                raise CountError(f"layer {layer}: rank {rank} ran {got}, rank 0 of layer 0 {names}")
    return tuple(_collective(name, i, table) for i, name in enumerate(names))


def _collective(name: str, index: int, table: list[list[LayerCounts]]) -> Collective:
    """Operation `index` of every layer as one Collective over L layers."""
    operations = [[counts.operations[index] for counts in row] for row in table]
    row_bytes = operations[0][0].row_bytes
    for layer, row in enumerate(operations):
        for rank, o in enumerate(row):
            if o.row_bytes != row_bytes:
                raise CountError(f"layer {layer}, {name}: {o.row_bytes} bytes a row on rank {rank}, {row_bytes} on 0")
    if operations[0][0].buffer_rows is not None:
        for layer, row in enumerate(operations):
            for rank, o in enumerate(row):
                if o.buffer_rows != row[0].buffer_rows:
                    raise CountError(f"layer {layer}, {name}: {o.buffer_rows} rows on rank {rank}, not as on rank 0")
        rows_L = np.array([row[0].buffer_rows for row in operations], dtype=np.int64)
        return Collective(name, row_bytes, buffer_rows_L=rows_L)
    sent_LGG = np.array([[o.sent_G for o in row] for row in operations], dtype=np.int64)
    received_LGG = np.array([[o.received_G for o in row] for row in operations], dtype=np.int64).swapaxes(1, 2)
    for layer in range(len(operations)):
        for s in range(sent_LGG.shape[1]):
            _compare(name, layer, s, sent_LGG[layer, s], received_LGG[layer, s])
    return Collective(name, row_bytes, received_LGG.copy())
