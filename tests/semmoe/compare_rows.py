"""Hand-made result rows for the tests of compare and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semmoe.row_files import write_row

PAIRS = json.dumps([[40, 10, 30, 20], [10, 40, 20, 30], [30, 20, 40, 10], [20, 30, 10, 40]])
SPANS = [["dispatch", 0, 0.0, 6.0, [6.0] * 4], ["experts", 0, 6.0, 4.0, [4.0, 3.0, 2.0, 4.0]]]
AXES = {
    "cluster": "local",
    "seed": 0,
    "workload": {"kind": "batches", "composition": "shuffled"},
    "placement": {"slots": None},
}
SERVE = {"workload": "serve", "batch_tokens": None}
SEMANTIC = {"placement": "semantic", "request_scheduler": "semantic_request"}


def row(backend: str = "simulator", config: str = "aaa", **changes: Any) -> dict[str, Any]:
    """A whole row. The figures are invented for tests of joining and wording; nothing ships them."""
    measured = backend == "harness"
    base: dict[str, Any] = {
        "config_id": config, "backend": backend, "run": "t", "transport": "collective", "kernel_path": "torch",
        "commit": "abc", "seed": 0, "repeat": 0, "cluster": "local", "cluster_digest": "d", "model": "tiny", "trace": "t.npz",
        "trace_digest": "x", "flow": "dp", "dispatcher": "a2a_dedup", "ep_size": 4, "slots": 32, "placement": "contiguous",
        "predictor": "token_table", "replica_router": "-", "request_scheduler": "round_robin", "token_scheduler": "-",
        "workload": "batches", "batch_tokens": 512, "dtype": "fp32", "scope": "moe_layers", "axes": json.dumps(AXES),
        "tokens": 1000, "steps": 2, "provenance": "test", "lar_planned": 0.26, "fan_out_planned": 2.1,
        "bytes_per_token_planned": 100.0, "lar_per_layer": "[0.25, 0.25]", "fan_out_per_layer": "[2.1, 2.1]",
        "imbalance_per_layer": "[1.1, 1.1]", "assignment_pairs": PAIRS, "rank_pairs": PAIRS,
        "imbalance_step": 1.1, "imbalance_total": 1.05, "home_imbalance": 1.0, "active_experts": 8.0, "node_bytes": 5000.0,
        "nic_bytes": 0.0, "metadata_bytes": 80.0, "dispatch_bytes": 2500.0, "combine_bytes": 2500.0, "layer_ms": 10.0,
        "step_ms": 20.0, "dispatch_ms": 6.0, "experts_ms": 4.0,
        f"lar_{'measured' if measured else 'replayed'}": 0.25,
        f"fan_out_{'measured' if measured else 'replayed'}": 2.1,
        f"bytes_per_token_{'measured' if measured else 'replayed'}": 101.0,
    }  # fmt: skip
    if not measured:
        base |= {"step_timeline": json.dumps({"tokens": 512, "layers": 2, "spans": SPANS})}
    if measured:
        base |= {"environment": json.dumps({"cores": 2, "load_1min": 1.5})}
    return base | changes


def measured(config: str, values_ms: list[float], **changes: Any) -> list[dict[str, Any]]:
    return [row("harness", config, repeat=i, layer_ms=v, layer_ms_ci_low=v * 0.98, layer_ms_ci_high=v * 1.02, **changes)
            for i, v in enumerate(values_ms)]  # fmt: skip


def folder(tmp_path: Path, *rows: dict[str, Any]) -> list[Path]:
    """The rows as files of one run."""
    for one in rows:
        write_row(tmp_path, one)
    return [tmp_path]


def line(comparison: Any, config: str) -> Any:
    """What a comparison says of one configuration."""
    return comparison.table.set_index("config_id").loc[config]
