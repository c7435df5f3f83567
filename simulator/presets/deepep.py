"""Times of DeepEP for a preset: low latency as measured, normal mode by the law of its rows or of the source machine's."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from ..cost.deepep import DeepEPLaw
from ..validation.deepep_law import FIT_NODES, SOURCE, laws_of, scaled

DEEPEP_SMS = 20  # DeepEP's Buffer.num_sms, which vLLM and SGLang keep
DEEPEP_LINKS = {  # machines on which DeepEP's normal mode runs, as its tables and LINK_GBPS name them
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "h800_sxm": "h800_sxm",
    "h20_96g": "h20",
    "b200_sxm": "b200_sxm",
    "gb200_nvl72": "gb200",
}
DEEPEP_SHAPE = {"ep_size": 8, "hidden_size": 2048, "num_topk": 8, "num_experts": 128}


def deepep(hardware: str, low_latency: str | None, data: Path) -> tuple[dict[str, Any], str]:
    """(the preset's deepep tables, empty where there are none; where they come from). low_latency: system of that table."""
    held, words = {}, []
    if low_latency:
        held["low_latency"] = _low_latency(low_latency, data)
        words.append("low_latency: measured, EP8, hidden 2048, top-8 of 128, FP8 out, BF16 back")
    if hardware in DEEPEP_LINKS:
        held["normal"], told = _normal(DEEPEP_LINKS[hardware], data)
        words.append(told)
    return held, "; ".join(words)


def _low_latency(system: str, data: Path) -> dict[str, Any]:
    table = pd.read_csv(data / "deepep_low_latency.csv")
    keep = table.system == system
    for column, value in DEEPEP_SHAPE.items():
        keep &= table[column] == value
    rows = table[keep].sort_values("tokens_per_rank")
    return {
        "ranks": DEEPEP_SHAPE["ep_size"],
        "hidden": DEEPEP_SHAPE["hidden_size"],
        "top_k": DEEPEP_SHAPE["num_topk"],
        "num_experts": DEEPEP_SHAPE["num_experts"],
        "tokens_per_rank": rows.tokens_per_rank.tolist(),
        "dispatch_us": rows.dispatch_us.tolist(),
        "combine_us": rows.combine_us.tolist(),
    }


def _normal(system: str, data: Path) -> tuple[dict[str, Any], str]:
    """deepep.normal of a machine (simulator/cost/deepep.py) and where its laws come from."""
    table = pd.read_csv(data / "deepep_normal.csv")
    own = system in set(table.system)
    rows = table[table.system == (system if own else SOURCE)]
    made: dict[str, Any] = {
        "sms": DEEPEP_SMS,
        "ranks_per_node": int(rows[rows.node_num == 1].ep_size.max()),
        "nodes": max(FIT_NODES),
    }
    words = []
    for block in ("node", "between"):
        source = system if own and block in _laws(data, system) else SOURCE
        laws = _laws(data, source)[block]
        if source != system:
            laws = {op: scaled(law, system) for op, law in laws.items()}
        made[block] = {} if source == system else {"from": source}
        made[block] |= {op: _constants(law) for op, law in laws.items()}
        words.append(f"{block} fitted to {source}" + ("" if source == system else ", links by the datasheets"))
    said = f"normal: {', '.join(words)}, all shapes and SM counts; {DEEPEP_SMS} SMs are the engines' default"
    return made, said


@cache
def _laws(data: Path, system: str) -> dict[str, dict[str, DeepEPLaw]]:
    return laws_of(pd.read_csv(data / "deepep_normal.csv"), system)


def _constants(law: DeepEPLaw) -> dict[str, float]:
    """The law's figures to four digits; what is nothing is left out."""
    rounded = {name: float(f"{value:.4g}") for name, value in asdict(law).items()}
    return {name: value for name, value in rounded.items() if value > 1e-4}
