"""ResultTable: the one schema of a result row, for both backends. row_files.py writes and reads rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from .errors import UserError, nearest

TIMED = (
    "plan",
    "gate",
    "attention",
    "permute",
    "srs",
    "dispatch",
    "experts",
    "combine",
    "sag",
    "other",
    "wait",
    "core_wait",
    "layer",
    "step",
)
WHOLE = {
    "layer": "one MoE layer end to end",
    "step": "one forward pass",
    "wait": "of one MoE layer, a rank's waiting in exchanges for the last one to enter",
    "core_wait": "of one MoE layer, a rank's waiting for a core on which another rank computes",
}
WHOLE_OVER_RANKS = {
    "layer": "slowest rank",
    "step": "slowest rank",
    "attention": "slowest rank",
    "wait": "mean over ranks",
    "core_wait": "mean over ranks",
}
WAITS = ("wait", "core_wait")  # no phases: the rest of a layer adds up without them
SERVED = ("ttft", "tpot", "e2e")
QUANTILES = (10, 50, 90, 99)
EXCHANGES = (
    "dispatch",
    "combine",
    "srs",
    "sag",
)  # phases between ranks; the all-reduces of tp_replicated are srs and sag
OPS = ("srs", "sag", "reduce_scatter", "all_gather", "all_reduce", "dispatch", "combine", "expert_ids")


@dataclass(frozen=True)
class Column:
    """One column of the schema: its kind ("str", "int", "float") and what it means, unit included."""

    kind: str
    meaning: str
    required: bool = False


def _columns() -> dict[str, Column]:
    columns = {
        "config_id": Column("str", "hash of the swept axes, model, trace digest and seed; joins the backends", True),
        "backend": Column("str", "simulator or harness", True),
        "run": Column("str", "name of the run (folder under results/runs)", True),
        "transport": Column("str", "collective, shared, virtual, symmetric; 'modelled' in the simulator", True),
        "kernel_path": Column("str", "torch (timed twin), triton, interpreter; 'cost_model' in the simulator", True),
        "planned_on": Column(
            "str", "harness: host or device (the ranks), who planned the homes of every layer; tp_shuffled only"
        ),
        "cuda_graph": Column("str", "harness: on (layers replayed from CUDA graphs), or off and why"),
        "flush_mb": Column(
            "float", "harness: megabytes that a rank wrote before each timed layer (cold caches); 0: warm"
        ),
        "commit": Column("str", "git commit of the code, '+' appended when the tree had changes"),
        "seed": Column("int", "seed of split, workload and policies", True),
        "repeat": Column("int", "number of the repeat, from 0", True),
        "environment": Column(
            "str", "machine, library versions, load; GPUs: driver, NCCL, clocks, power before and after: JSON"
        ),
        "cluster": Column("str", "name of the cluster preset or calibration", True),
        "cluster_digest": Column("str", "hash of the cluster's whole content", True),
        "settings_digest": Column("str", "hash of settings outside config_id (slo, cost, measure, plug-in sources)"),
        "model": Column("str", "model name", True),
        "trace": Column("str", "file name of the trace", True),
        "trace_digest": Column("str", "content hash of the trace", True),
        "flow": Column("str", "dp, tp_replicated, tp_scattered or tp_shuffled", True),
        "dispatcher": Column("str", "dispatcher, 'none' in tp_replicated", True),
        "ep_size": Column("int", "ranks of the expert-parallel group", True),
        "slots": Column("int", "expert slots a layer over all ranks", True),
        "placement": Column("str", "placement policy", True),
        "predictor": Column("str", "predictor", True),
        "replica_router": Column("str", "replica router", True),
        "request_scheduler": Column("str", "request scheduler; '-' where the flow has none", True),
        "token_scheduler": Column("str", "token scheduler; '-' where the flow has none", True),
        "home_cap": Column("float", "most tokens on a home rank over the mean"),
        "workload": Column("str", "batches or serve", True),
        "rate_rps": Column("float", "offered requests a second (serve)"),
        "batch_tokens": Column("int", "tokens a batch over all ranks (batches)"),
        "dtype": Column("str", "activation dtype", True),
        "scope": Column("str", "moe_layers or full_model: what a step executes", True),
        "axes": Column("str", "every swept axis: canonical JSON whose hash is config_id", True),
        "tokens": Column("int", "tokens counted, over all steps", True),
        "steps": Column("int", "steps or batches executed", True),
    }
    for when, source in (
        ("planned", "from the profile alone, before any held-out route"),
        ("replayed", "held-out routes in the simulator"),
        ("measured", "counted in what the harness sent"),
    ):
        columns[f"lar_{when}"] = Column("float", f"local activation rate, {source}")
        columns[f"fan_out_{when}"] = Column("float", f"distinct remote ranks a token, {source}")
        columns[f"bytes_per_token_{when}"] = Column("float", f"payload bytes a token over all layers, {source}")
    columns |= {
        "lar_per_layer": Column("str", "LAR of each MoE layer: JSON list"),
        "fan_out_per_layer": Column("str", "fan-out of each MoE layer: JSON list"),
        "imbalance_per_layer": Column("str", "imbalance_step of each MoE layer: JSON list"),
        "assignment_pairs": Column(
            "str", "assignments [home rank][serving rank], all steps and layers: JSON (to 64 ranks)"
        ),
        "rank_pairs": Column("str", "distinct (token, serving rank) pairs [home rank][serving rank], likewise: JSON"),
        "imbalance_step": Column("float", "mean over steps and layers of max/mean expert rows a rank"),
        "imbalance_total": Column("float", "max/mean expert rows a rank over the whole set, mean over layers"),
        "home_imbalance": Column("float", "max/mean tokens a home rank over the whole set, mean over layers"),
        "active_experts": Column("float", "experts with a row on the busiest rank, mean over steps and layers"),
        "node_bytes": Column("float", "payload bytes inside a node (relayed ones too), all steps"),
        "nic_bytes": Column("float", "payload bytes between nodes, all steps"),
        "spine_bytes": Column("float", "those of them that leave their leaf switch, all steps"),
        "kv_moved_bytes": Column(
            "float", "KV cache that moved because requests were re-homed after their head (0: none did)"
        ),
        "kv_move_ms": Column("float", "the move of one re-homed request alone on its link, mean (0: none moved)"),
        "metadata_bytes": Column("float", "slot ids and gate weights that travelled, all steps"),
        "route_flips": Column(
            "float",
            "share of (token, layer) whose free gate differs from the trace (harness; prompts cut by max_prompt lack "
            "the context of the trace, so whole models flip there)",
        ),
        "output_error": Column("float", "relative norm against the single-process reference (harness)"),
    }
    columns |= {f"{op}_bytes": Column("float", f"payload bytes of {op}, all steps") for op in OPS}
    columns["local_bytes"] = Column(
        "float", "payload bytes of exchanges that stayed on their rank, all steps (harness)"
    )
    for name in EXCHANGES:
        columns[f"{name}_busbw_gbps"] = Column(
            "float", f"bytes of {name} at the busiest port, as nccl-tests counts them, over {name}_ms (harness)"
        )
        columns[f"{name}_link_share"] = Column("float", f"{name}_busbw_gbps / link_peak_gbps; null without a link")
    columns |= {
        "link_peak_gbps": Column("float", "one large copy between GPUs, measured before the run; null without a link"),
        "link": Column("str", "harness: how link_peak_gbps was measured, or that no link speed follows and why"),
    }
    for name in TIMED:
        whole = WHOLE.get(name, f"{name} phase of one MoE layer")
        ranks = WHOLE_OVER_RANKS.get(name, "critical path")
        columns[f"{name}_ms"] = Column("float", f"{whole}, mean, {ranks}")
        columns |= {f"{name}_ms_p{q}": Column("float", f"{whole}, {q}th percentile") for q in QUANTILES}
    for name in SERVED:
        columns[f"{name}_ms"] = Column("float", f"{name} over requests, mean")
        columns |= {f"{name}_ms_p{q}": Column("float", f"{name} over requests, {q}th percentile") for q in QUANTILES}
    columns["kv_transfer_ms"] = Column(
        "float", "KV transfer of a request from prefill to decode rank, waiting included"
    )
    columns |= {
        f"kv_transfer_ms_p{q}": Column("float", f"KV transfer of a request, {q}th percentile") for q in QUANTILES
    }
    columns["itl_ms"] = Column("float", "time between two output tokens of a request, mean over all tokens")
    columns |= {f"itl_ms_p{q}": Column("float", f"time between two output tokens, {q}th percentile") for q in QUANTILES}
    columns |= {
        "layer_ms_ci_low": Column("float", "layer_ms, lower end of the 95 % bootstrap interval"),
        "layer_ms_ci_high": Column("float", "layer_ms, upper end of the 95 % bootstrap interval"),
        "throughput_rps": Column("float", "finished requests a second"),
        "goodput_rps": Column("float", "finished requests a second within the SLO"),
        "slo_ttft_ms": Column("float", "bound on ttft that goodput was counted with"),
        "slo_tpot_ms": Column("float", "bound on tpot that goodput was counted with"),
        "slo_e2e_ms": Column("float", "bound on e2e that goodput was counted with"),
        "preemptions": Column("int", "requests restarted for lack of KV cache"),
        "kv_bytes": Column("float", "KV cache sent from prefill to decode ranks (serving.prefill_ranks)"),
        "prefix_hit_rate": Column(
            "float", "prompt tokens whose KV the request's rank held already / all prompt tokens"
        ),
        "replacements": Column("int", "re-placements at run time (replacement.every_steps)"),
        "migration_node_bytes": Column("float", "expert weights that moved inside nodes, all re-placements"),
        "migration_nic_bytes": Column("float", "expert weights that moved between nodes, all re-placements"),
        "replacement_stall_ms": Column("float", "time that steps waited for weights, all re-placements"),
        "replacement_gain_ms": Column(
            "float", "mean gain of a later step over the run without re-placement, stalls apart"
        ),
        "replacement_net_ms": Column(
            "float", "all gains less all stalls: above 0, re-placement paid (served: earlier end)"
        ),
        "replacement_e2e_gain_ms": Column(
            "float", "served: mean over requests, end-to-end time without re-placement - with it"
        ),
        "replacement_tpot_gain_ms": Column("float", "served: the same of the time per output token"),
        "break_even_steps": Column("float", "steps whose gain makes up for one re-placement's stall; null: no gain"),
        "provenance": Column(
            "str",
            "where the times come from: measured, interpolated, fitted, roofline, transferred (from another machine's "
            "law), ...",
            True,
        ),
        "step_timeline": Column(
            "str", "one step's first MoE layers by phase and rank (simulator): JSON, timeline_trace.py"
        ),
        "times_file": Column(
            "str", "raw milliseconds beside the row, .npz: [steps, layers] by phase, layer; [steps] step"
        ),
        "steps_file": Column("str", "log of the step plans beside the row, for simulate replay="),
    }
    return columns


COLUMNS = _columns()
SPENT = ("layer_ms", "step_ms", "ttft_ms", "tpot_ms", "e2e_ms", "tokens", "steps")  # never below 0, as bytes


def check_row(row: Mapping[str, Any], where: str = "row") -> dict[str, Any]:
    """The row with every value in its column's kind; UserError for an unknown, missing or mistyped column."""
    checked: dict[str, Any] = {}
    for name, value in row.items():
        if name not in COLUMNS:
            raise UserError(f"{where}: unknown column '{name}'{nearest(name, COLUMNS)}")
        kind = COLUMNS[name].kind
        try:
            if value is None or (kind != "str" and isinstance(value, float) and math.isnan(value)):
                checked[name] = None
            else:
                checked[name] = {"str": str, "int": int, "float": float}[kind](value)
                if kind == "float" and math.isinf(checked[name]):
                    raise ValueError
                if kind != "str" and (name in SPENT or name.endswith("_bytes")) and checked[name] < 0:
                    raise ValueError
        except (TypeError, ValueError, OverflowError):
            right = "finite float" if kind == "float" else kind
            right += " of at least 0" if name in SPENT or name.endswith("_bytes") else ""
            raise UserError(f"{where}: column {name} holds {value!r}; {right} is right") from None
    missing = [name for name, column in COLUMNS.items() if column.required and checked.get(name) is None]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    return checked


def summary_ms(name: str, values: Any) -> dict[str, float]:
    """{name_ms, name_ms_p10, _p50, _p90, _p99} of samples in milliseconds (nothing for none)."""
    series = pd.Series(values, dtype=float).dropna()
    if series.empty:
        return {}
    quantiles = series.quantile([q / 100 for q in QUANTILES])
    return {
        f"{name}_ms": float(series.mean()),
        **{f"{name}_ms_p{q}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
    }


def columns_document() -> str:
    """The schema as a Markdown table (docs/columns.md)."""
    lines = ["# Columns of a result row", "", "Made by `python -m semmoe.results > docs/columns.md`.", ""]
    lines += ["| column | kind | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{n}` | {c.kind}{', required' if c.required else ''} | {c.meaning} |" for n, c in COLUMNS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(columns_document())
