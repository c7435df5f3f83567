"""A closed law of DeepEP's times on H100, and what it says about a machine with other links.

    time = floor + x / bandwidth + tokens * top_k * per_row / sms
    1 / bandwidth^4 = 1 / (link share)^4 + 1 / (sms * per-SM bandwidth)^4          (normal mode)
    bandwidth = link share                                                         (low latency)

x: bytes that a rank sends to others: one copy per assignment in low latency, one per distinct rank in normal mode; rows
are FP8 with a scale per 128 values on the way out, BF16 on the way back. Another machine has the link share scaled by
the ratio of the two datasheets' link bandwidths; floor and per-SM bandwidth stay, since no datasheet tells them.
Constants: fitted to DeepEP 0.5.12 rows of h100_sxm, one node [ai-dynamo/aiconfigurator@095f58a5] by `fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, inf

import numpy as np
import pandas as pd

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


@dataclass(frozen=True)
class DeepEPLaw:
    """Constants of one operation on the source machine; per_row_us of one row on one SM."""

    floor_us: float
    link_gbps: float
    sm_gbps: float
    per_row_us: float

    def time_us(self, sent_bytes: Float, rows: Float, sms: Float, link_ratio: float = 1.0) -> Float:
        """link_ratio: links of the machine over those of H100."""
        link, by_sms = self.link_gbps * link_ratio, self.sm_gbps * sms
        bandwidth = (link**-4 + by_sms**-4.0) ** -0.25
        return np.asarray(self.floor_us + sent_bytes / (1e3 * bandwidth) + rows * self.per_row_us / sms)


LAWS = {
    ("low_latency", "dispatch"): DeepEPLaw(12.30, 220.6, inf, 0.0),
    ("low_latency", "combine"): DeepEPLaw(11.38, 212.3, inf, 0.0),
    ("normal", "dispatch"): DeepEPLaw(27.02, 334.1, 13.59, 0.0200),
    ("normal", "combine"): DeepEPLaw(39.13, 299.2, 14.58, 0.0),
}


def mode_of(table: pd.DataFrame) -> str:
    return "normal" if "dispatch_sms" in table.columns else "low_latency"


def inputs(table: pd.DataFrame, op: str) -> tuple[Float, Float, Float]:
    """(bytes that a rank sends to others, rows of a rank, SMs) of every row of a DeepEP table."""
    ranks, top_k = table.ep_size.to_numpy(np.float64), table.num_topk.to_numpy(np.float64)
    tokens, hidden = table.tokens_per_rank.to_numpy(np.float64), table.hidden_size.to_numpy(np.float64)
    if mode_of(table) == "low_latency":
        copies, sms = top_k * (ranks - 1) / ranks, np.ones(len(table))
    else:
        shapes = zip(table.num_experts, table.num_topk, table.ep_size, strict=True)
        copies = np.array([remote_ranks(*(int(v) for v in shape)) for shape in shapes])
        sms = table[f"{op}_sms"].to_numpy(np.float64)
    row_bytes = hidden * (1 + 4 / 128) if op == "dispatch" else 2 * hidden
    return tokens * copies * row_bytes, tokens * top_k, sms


def remote_ranks(experts: int, top_k: int, ranks: int) -> float:
    """Distinct other ranks of a token with even routing: 128 experts, top-8, 8 ranks: 4.67."""
    each = experts // ranks
    return (ranks - 1) * (1 - comb(experts - each, top_k) / comb(experts, top_k))


def predicted_us(table: pd.DataFrame, op: str, source: pd.DataFrame | None = None) -> Float:
    """Times of one machine's rows from H100's law and the datasheets' links.

    source: measured H100 rows; where they hold the very same shape, tokens and SMs, the measured time is scaled by the
    law instead of trusting its constants alone. Rows of machines without a known link give nan.
    """
    law = LAWS[mode_of(table), op]
    sent, rows, sms = inputs(table, op)
    ratio = (table.system.map(LINK_GBPS) / LINK_GBPS[SOURCE]).to_numpy(np.float64)
    guess = np.full(len(table), np.nan)
    for value in np.unique(ratio[~np.isnan(ratio)]):
        at = ratio == value
        guess[at] = law.time_us(sent[at], rows[at], sms[at], float(value))
    if source is None or source.empty:
        return guess
    keys = ["node_num", "ep_size", "hidden_size", "num_topk", "num_experts", "tokens_per_rank"]
    keys += ["dispatch_sms", "combine_sms"] if mode_of(table) == "normal" else []
    known = source.groupby(keys)[f"{op}_us"].median().rename("known")
    measured = table[keys].join(known, on=keys).known.to_numpy(np.float64)
    scaled = measured * guess / law.time_us(sent, rows, sms)
    return np.where(np.isnan(measured), guess, scaled)


def fit(table: pd.DataFrame, op: str) -> DeepEPLaw:
    """The law of the source machine's rows of one node, robust least squares of relative errors."""
    from scipy.optimize import least_squares

    rows_of = table[(table.system == SOURCE) & (table.node_num == 1)]
    sent, rows, sms = inputs(rows_of, op)
    us, normal = rows_of[f"{op}_us"].to_numpy(np.float64), mode_of(table) == "normal"

    def law(p: Float) -> DeepEPLaw:
        floor, link, sm, row = np.exp(p)
        return DeepEPLaw(floor, link, sm, row) if normal else DeepEPLaw(floor, link, inf, 0.0)

    start = np.log([25.0 if normal else 15.0, 250.0, 12.0, 1e-3])
    found = least_squares(lambda p: np.log(law(p).time_us(sent, rows, sms) / us), start, loss="soft_l1")
    return law(found.x)
