"""DeepEP: held-out token counts through the classes that price dispatch and combine, and a machine from another's law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import yaml

from semmoe.config import conf_dir
from semmoe.dispatch import DispatchSpec
from semmoe.specs import ClusterSpec
from semmoe.traffic import count_traffic

from ..cost.collectives import CollectiveCost
from ..cost.deepep import OPS, DeepEPLaw
from .collectives import curve
from .deepep_law import (
    FIT_NODES,
    LINK_GBPS,
    LOW_LATENCY,
    SOURCE,
    fit,
    inputs,
    laws_of,
    measured_us,
    mode_of,
    newest,
    predicted_us,
)
from .row import Float, Row, held_out, read, scored

SHAPE = ("system", "sglang_version", "node_num", "ep_size", "hidden_size", "num_topk", "num_experts")
SMS = ("dispatch_sms", "combine_sms")
WIDE = {"hidden_size": 7168, "num_topk": 8, "num_experts": 256}  # DeepSeek-V3, the shape of the rows over several nodes
CLUSTERS = ("h100x8", "h100x16", "h100x32")
MOST_TOKENS = 1024  # a rank, that are priced through routes


def deepep_columns(mode: str) -> tuple[str, ...]:
    return (*SHAPE, *(SMS if mode == "normal" else ()), "tokens_per_rank", "dispatch_us", "combine_us")


def deepep_rows(low_latency: object, normal: object) -> list[Row]:
    """Held-out token counts of both modes, whole exchanges on the presets, and H100 -> B200 by the datasheets."""
    low, table = (read(path, deepep_columns(mode)) for path, mode in ((low_latency, "low_latency"), (normal, "normal")))
    held = is_held_out(table)
    laws = {
        block: {op: asdict(law) for op, law in by_op.items()} for block, by_op in laws_of(table[~held], SOURCE).items()
    }
    rows = [
        scored("deepep.low_latency", "DeepEP low latency, dispatch and combine", curve_error(low).error, 10),
        transfer(
            "deepep.low_latency.transfer", "DeepEP low latency, B200 from H100 by the datasheets", low, "b200_sxm"
        ),
        law_row("deepep.normal", "DeepEP normal, dispatch and combine, by the law of the presets", table),
        transfer("deepep.normal.transfer", "DeepEP normal, B200 from H100 by the datasheets", table, "b200_sxm"),
    ]
    for name in CLUSTERS:
        cluster = preset(name)
        fitted = replace(cluster, deepep=cluster.deepep | {"normal": cluster.deepep["normal"] | laws})
        sms = cluster.deepep["normal"]["sms"]
        at_sms = table[held & (table.dispatch_sms == sms) & (table.combine_sms == sms)]
        rows.append(exchange_row(fitted, "a2a_dedup", at_sms, f"{sms} SMs, law from the other token counts", 10))
        rows.append(exchange_row(cluster, "low_latency", low, "the preset's table of EP8, hidden 2048, or its curves"))
    return rows


def is_held_out(table: pd.DataFrame) -> pd.Series:
    """Every other of the table's token counts, the edges never."""
    return table.tokens_per_rank.isin(np.sort(table.tokens_per_rank.unique())[1:-1:2])


def law_row(key: str, what: str, table: pd.DataFrame, bar: float = 10) -> Row:
    """Normal mode of every machine by the law of its other token counts; one machine's rows over 2 and 4 nodes too."""
    errors = []
    for system, part in table.groupby("system"):
        laws = laws_of(part[~is_held_out(part)], str(system))
        for block, by_op in laws.items():
            nodes = (1,) if block == "node" else FIT_NODES
            rows = part[is_held_out(part) & part.node_num.isin(nodes)]
            if block == "node":
                rows = rows[rows.sglang_version.astype(str) == newest(part)]
            for op, law in by_op.items():
                where = f"{system}" + ("" if block == "node" else " over nodes")
                errors.append(pd.DataFrame({"where": where, "error": error_of(rows, op, law)}))
    error = pd.concat(errors)
    medians = (100 * error.error.abs()).groupby(error["where"]).median()
    note = "median by machine: " + ", ".join(f"{where} {value:.1f}" for where, value in medians.items())
    return scored(key, what, error.error, bar, note=f"all shapes and SM counts; {note}")


def error_of(table: pd.DataFrame, op: str, law: DeepEPLaw) -> Float:
    return np.asarray(inputs(table, op).time_us(law) / measured_us(table, op) - 1)


def curve_error(table: pd.DataFrame) -> pd.DataFrame:
    """Every shape by a curve over its own other token counts, as LowLatencyTable has one."""
    keys = (*SHAPE, *SMS) if mode_of(table) == "normal" else SHAPE
    return pd.concat(held_out(table, keys, "tokens_per_rank", f"{op}_us", curve).assign(op=op) for op in OPS)


def exchange_row(cluster: ClusterSpec, dispatcher: str, table: pd.DataFrame, how: str, bar: float = 0) -> Row:
    """Dispatch + combine of even routes on all ranks of a preset, priced as a simulation does."""
    keep = (table.system == SOURCE) & (table.node_num == cluster.nodes) & (table.tokens_per_rank <= MOST_TOKENS)
    for column, value in WIDE.items():
        keep &= table[column] == value
    rows = table[keep]
    rows = rows[rows.sglang_version == rows.sglang_version.max()]
    spec = DispatchSpec(
        flow="dp", dispatcher=dispatcher, hidden=WIDE["hidden_size"], top_k=WIDE["num_topk"], dispatch_dtype="fp8"
    )
    counts = sorted(int(count) for count in rows.tokens_per_rank.unique())
    predicted = even_exchange_us(cluster, spec, counts)
    whole = rows.assign(us=measured_us(rows, "dispatch") + measured_us(rows, "combine")).groupby("tokens_per_rank").us
    error = predicted / whole.median().loc[counts].to_numpy() - 1
    told = ", ".join(f"{count}: {100 * value:+.0f} %" for count, value in zip(counts, error, strict=True))
    what = f"{dispatcher} on {cluster.name}, EP{cluster.ranks}, dispatch + combine of even routes"
    return scored(f"exchange.{dispatcher}.{cluster.name}", what, error, bar, note=f"{how}; tokens a rank: {told}")


def even_exchange_us(cluster: ClusterSpec, spec: DispatchSpec, counts: Sequence[int]) -> Float:
    """Dispatch + combine of so many tokens a rank on all ranks of a cluster, each with top_k of 256 experts at random."""
    rng, ranks, experts = np.random.default_rng(0), cluster.ranks, WIDE["num_experts"]
    cost = CollectiveCost(cluster, spec, ranks, experts // ranks)
    made = []
    for count in counts:
        chosen = np.argpartition(rng.random((count * ranks, 1, experts), dtype=np.float32), spec.top_k, axis=2)
        homes = np.repeat(np.arange(ranks), count)
        traffic = count_traffic(chosen[:, :, : spec.top_k], homes, experts, ranks, spec, cost.wiring)
        times = cost.phases_us(traffic)
        made.append(float(times["dispatch"][0] + times["combine"][0]))
    return np.array(made)


def transfer(key: str, what: str, table: pd.DataFrame, target: str, source: pd.DataFrame | None = None) -> Row:
    """Both operations of one machine from H100's law and the links of the two datasheets.

    source: rows of H100 on one node, by default the table's own; without any, the committed laws alone.
    """
    source = source_rows(table) if source is None else source
    part = table[(table.system == target) & (table.node_num == 1)]
    laws = committed_laws(mode_of(table))
    if not source.empty:
        laws = {op: fit(source, op) for op in OPS}
    error = np.concatenate([predicted_us(part, op, laws[op], source) / measured_us(part, op) - 1 for op in OPS])
    error = error[~np.isnan(error)]
    links = f"links {LINK_GBPS[SOURCE]:g} and {LINK_GBPS.get(target, float('nan')):g} GB/s"
    mean = f"mean signed error {100 * float(np.mean(error)):+.0f} %" if len(error) else ""
    return scored(key, what, error, note=f"{links}; all but the links kept; {mean}")


def source_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the source machine on one node, of the newest version."""
    rows = table[(table.system == SOURCE) & (table.node_num == 1)]
    return rows if rows.empty else rows[rows.sglang_version.astype(str) == newest(rows)]


def preset(name: str) -> ClusterSpec:
    return ClusterSpec.from_dict(yaml.safe_load((conf_dir() / "cluster" / f"{name}.yaml").read_text()))


def committed_laws(mode: str) -> dict[str, DeepEPLaw]:
    """Of the source machine on one node, by operation."""
    if mode == "low_latency":
        return LOW_LATENCY
    node: dict[str, Any] = preset("h100x8").deepep["normal"]["node"]
    return {op: DeepEPLaw(**node[op]) for op in OPS}
