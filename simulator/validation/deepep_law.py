"""Fits of DeepEP's law (simulator/cost/deepep.py) to tables of its rows, and what one machine's say about another's.

Low latency is the same law with links alone: one copy per assignment, rows of FP8 with a scale per 128 values on the way
out, BF16 on the way back. Over several nodes the rows hold one width only, so that the constants which need several (the
time of a longer row, NVLink) are those found inside a node; a NIC carries NIC_GBPS. Another machine has `link_gbps` scaled
by the ratio of the two datasheets' link bandwidths; the rest stays, since no datasheet tells it. Over 2 and 4 nodes the
time of telling sizes (`*_notify_us`) stands apart in the table and is part of the operation; 8 nodes (EP64) move a third
of what their NICs could and stay out of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb

import numpy as np
import pandas as pd

from ..cost.deepep import DeepEPLaw
from .row import Float

# one direction of one GPU's links, GB/s, as in the datasheets
LINK_GBPS = {
    "a100_sxm": 300.0,
    "h100_sxm": 450.0,
    "h200_sxm": 450.0,
    "h800_sxm": 200.0,
    "h20": 450.0,
    "b200_sxm": 900.0,
    "b300_sxm": 900.0,
    "gb200": 900.0,
    "gb300": 900.0,
}
SOURCE = "h100_sxm"
NIC_GBPS = 47.0  # of the machines with several nodes in the tables, as in the presets h100x16 and h100x32
FIT_NODES = (2, 4)
LOW_LATENCY = {  # fitted to DeepEP 0.5.12 rows of h100_sxm, one node [ai-dynamo/aiconfigurator@095f58a5] by `fit`
    "dispatch": DeepEPLaw(11.76, 244.6),
    "combine": DeepEPLaw(11.40, 215.9),
}


@dataclass(frozen=True)
class Inputs:
    """What the law reads, for every row of a DeepEP table with even routes."""

    port_bytes: Float
    row_bytes: Float
    tokens: Float
    sms: Float
    nic_us: Float
    nodes: Float

    def time_us(self, law: DeepEPLaw) -> Float:
        return law.time_us(self.port_bytes, self.row_bytes, self.tokens, self.sms, self.nic_us, self.nodes)


def mode_of(table: pd.DataFrame) -> str:
    return "normal" if "dispatch_sms" in table.columns else "low_latency"


def inputs(table: pd.DataFrame, op: str) -> Inputs:
    """Bytes, tokens and SMs of an operation in every row of a DeepEP table."""
    tokens, hidden = table.tokens_per_rank.to_numpy(np.float64), table.hidden_size.to_numpy(np.float64)
    nodes, row_bytes = table.node_num.to_numpy(np.float64), hidden * (1 + 4 / 128 if op == "dispatch" else 2)
    if mode_of(table) == "low_latency":
        ranks, top_k = table.ep_size.to_numpy(np.float64), table.num_topk.to_numpy(np.float64)
        copies, across, sms = top_k * (ranks - 1) / ranks, np.zeros(len(table)), np.ones(len(table))
    else:
        shapes = list(zip(table.num_experts, table.num_topk, table.ep_size, table.node_num, strict=True))
        copies = np.array([near_copies(*(int(v) for v in shape)) for shape in shapes])
        across = np.array([remote_units(int(e), int(k), int(n)) for e, k, _, n in shapes])
        sms = table[f"{op}_sms"].to_numpy(np.float64)
    nic_us = tokens * across * row_bytes / (1e3 * NIC_GBPS)
    return Inputs(tokens * copies * row_bytes, row_bytes, tokens, sms, nic_us, nodes)


def remote_units(experts: int, top_k: int, units: int) -> float:
    """Distinct other ranks (or nodes) of a token with even routing: 128 experts, top-8, 8 ranks: 4.67."""
    return (units - 1) * reached(experts, top_k, units)


def near_copies(experts: int, top_k: int, ranks: int, nodes: int) -> float:
    """Rows that a rank puts on its node's links for a token of its own and, over nodes, one of each peer's that it passes
    on: one for each distinct other rank there."""
    return nodes * (ranks // nodes - 1) * reached(experts, top_k, ranks)


def reached(experts: int, top_k: int, units: int) -> float:
    """Chance that one of `units` equal parts of the experts holds a choice of a token, even routing."""
    return 1 - comb(experts - experts // units, top_k) / comb(experts, top_k)


def measured_us(table: pd.DataFrame, op: str) -> Float:
    """Time of an operation, that of telling sizes included."""
    apart = table[f"{op}_notify_us"].fillna(0.0) if f"{op}_notify_us" in table.columns else 0.0
    return np.asarray(table[f"{op}_us"] + apart, dtype=np.float64)


def fit(table: pd.DataFrame, op: str, inside: DeepEPLaw | None = None) -> DeepEPLaw:
    """The law of one machine's rows, robust least squares of relative errors.

    inside: the law of one node, where these are rows of several; it brings what they cannot tell.
    """
    from scipy.optimize import least_squares

    at, log_us = inputs(table, op), np.log(measured_us(table, op))
    start = {"floor_us": 15.0, "link_gbps": 250.0}
    known: dict[str, float] = {}
    if mode_of(table) == "normal" and inside is None:
        start = {"floor_us": 25.0, "link_gbps": 400.0, "sm_gbps": 18.0, "token_us": 0.4, "row_ns_per_byte": 1.0}
    elif inside is not None:
        start = {"floor_us": 30.0, "sm_gbps": 10.0, "doubling_us": 30.0}
        known = {"link_gbps": inside.link_gbps, "row_ns_per_byte": inside.row_ns_per_byte}

    def law(logs: Float) -> DeepEPLaw:
        return DeepEPLaw(**known, **{name: float(value) for name, value in zip(start, np.exp(logs), strict=True)})

    first = np.log(list(start.values()))
    found = least_squares(lambda p: np.log(at.time_us(law(p))) - log_us, first, loss="soft_l1", f_scale=0.1)
    return law(found.x)


def laws_of(table: pd.DataFrame, system: str) -> dict[str, dict[str, DeepEPLaw]]:
    """Laws of a machine by block ("node", "between" where its rows hold several nodes) and operation.

    One node: rows of the newest version that the table holds for it."""
    rows = table[table.system == system]
    one = rows[(rows.node_num == 1) & (rows.sglang_version == newest(rows))]
    laws = {"node": {op: fit(one, op) for op in ("dispatch", "combine")}}
    several = rows[rows.node_num.isin(FIT_NODES)]
    if not several.empty and mode_of(table) == "normal":
        laws["between"] = {op: fit(several, op, law) for op, law in laws["node"].items()}
    return laws


def newest(rows: pd.DataFrame) -> str:
    """Newest version with rows of one node."""
    versions = rows[rows.node_num == 1].sglang_version.astype(str).unique()
    return str(max(versions, key=lambda v: tuple(int(part) for part in v.split("."))))


def scaled(law: DeepEPLaw, system: str, source: str = SOURCE) -> DeepEPLaw:
    """The law on a machine with other links; KeyError of a machine whose links are unknown."""
    return replace(law, link_gbps=law.link_gbps * LINK_GBPS[system] / LINK_GBPS[source])


def predicted_us(table: pd.DataFrame, op: str, law: DeepEPLaw, source: pd.DataFrame | None = None) -> Float:
    """Times of one machine's rows from the source machine's law and the datasheets' links.

    source: measured H100 rows; where they hold the very same shape, tokens and SMs, the measured time is scaled by the
    law instead of trusting its constants alone. Rows of machines without a known link give nan.
    """
    at, guess = inputs(table, op), np.full(len(table), np.nan)
    for system in set(table.system) & set(LINK_GBPS):
        here = (table.system == system).to_numpy()
        guess[here] = at.time_us(scaled(law, str(system)))[here]
    if source is None or source.empty:
        return guess
    keys = ["node_num", "ep_size", "hidden_size", "num_topk", "num_experts", "tokens_per_rank"]
    keys += ["dispatch_sms", "combine_sms"] if mode_of(table) == "normal" else []
    known = source.assign(known=measured_us(source, op)).groupby(keys).known.median()
    measured = table[keys].join(known, on=keys).known.to_numpy(np.float64)
    return np.where(np.isnan(measured), guess, measured * guess / at.time_us(law))
