"""NCCL on one node: held-out sizes through the simulator's own curve."""

from __future__ import annotations

from semmoe.specs import Curve

from ..cost.curves import LatencyCurve
from .row import Float, Model, Row, held_out, read, scored

MIB = 1 << 20
NCCL_COLUMNS = ("system", "nccl_version", "op", "num_gpus", "bytes", "latency_us")
NCCL_OPS = ("alltoall", "all_gather", "reduce_scatter")


def curve(x: Float, us: Float) -> Model:
    """The simulator's latency curve through these points."""
    return LatencyCurve(Curve(op="measured", ranks=0, bytes=tuple(x), latency_us=tuple(us))).time_us


def nccl_rows(path: object) -> list[Row]:
    """Held-out message sizes: pooled, by system above 1 MiB, and the other half of the sizes."""
    table = read(path, NCCL_COLUMNS)
    table = table[table.op.isin(NCCL_OPS)]
    keys = ("system", "nccl_version", "op", "num_gpus")
    error = held_out(table, keys, "bytes", "latency_us", curve)
    rows = [scored("nccl.pooled", "NCCL a2a, AG, RS, one node, pooled", error.error, 5, 15)]
    for system, part in error[error.bytes > MIB].groupby("system"):
        rows.append(scored(f"nccl.{system}", f"NCCL above 1 MiB, {system}", part.error, 0, 15))
    other = held_out(table, keys, "bytes", "latency_us", curve, parity=0)
    note = "the sizes that the rows above kept, edges apart; reported, since the bar names one half"
    return [*rows, scored("nccl.other_half", "NCCL pooled, the other half of the sizes", other.error, note=note)]
