"""NCCL on one node and DeepEP: held-out sizes through the simulator's own curve, and a machine from another's law."""

from __future__ import annotations

import numpy as np
import pandas as pd

from semmoe.specs import Curve

from ..cost.curves import LatencyCurve
from .deepep_law import LINK_GBPS, SOURCE, predicted_us
from .row import Float, Model, Row, held_out, read, scored

MIB = 1 << 20
NCCL_COLUMNS = ("system", "nccl_version", "op", "num_gpus", "bytes", "latency_us")
NCCL_OPS = ("alltoall", "all_gather", "reduce_scatter")
DEEPEP_SHAPE = ("system", "sglang_version", "node_num", "ep_size", "hidden_size", "num_topk", "num_experts")
SMS = ("dispatch_sms", "combine_sms")


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


def deepep_rows(low_latency: object, normal: object) -> list[Row]:
    """Held-out token counts of both modes, and H100 -> B200 by the datasheets."""
    tables = {
        "low_latency": (read(low_latency, deepep_columns("low_latency")), DEEPEP_SHAPE),
        "normal": (read(normal, deepep_columns("normal")), (*DEEPEP_SHAPE, *SMS)),
    }
    rows = []
    for mode, (table, keys) in tables.items():
        error = pd.concat(
            held_out(table, keys, "tokens_per_rank", f"{op}_us", curve).assign(op=op) for op in ("dispatch", "combine")
        )
        words = mode.replace("_", " ")
        rows.append(scored(f"deepep.{mode}", f"DeepEP {words}, dispatch and combine", error.error, 10, 0))
        source = table[(table.system == SOURCE) & (table.node_num == 1)]
        what = f"DeepEP {words}, B200 from H100 by the datasheets"
        rows.append(transfer(f"deepep.{mode}.transfer", what, table, "b200_sxm", source))
    return rows


def deepep_columns(mode: str) -> tuple[str, ...]:
    sms = SMS if mode == "normal" else ()
    return (*DEEPEP_SHAPE, *sms, "tokens_per_rank", "dispatch_us", "combine_us")


def transfer(key: str, what: str, table: pd.DataFrame, target: str, source: pd.DataFrame | None) -> Row:
    """Both operations of one machine from H100's law and the links of the two datasheets (deepep_law)."""
    part = table[(table.system == target) & (table.node_num == 1)]
    error = np.concatenate([predicted_us(part, op, source) / part[f"{op}_us"] - 1 for op in ("dispatch", "combine")])
    error = error[~np.isnan(error)]
    links = f"links {LINK_GBPS[SOURCE]:g} and {LINK_GBPS.get(target, float('nan')):g} GB/s"
    mean = f"mean signed error {100 * float(np.mean(error)):+.0f} %" if len(error) else ""
    return scored(key, what, error, note=f"{links}; floor and bandwidth per SM kept; {mean}")
