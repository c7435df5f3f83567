"""Silicon: a cluster priced by the public measured database of the PyPI package `aiconfigurator-core` (Apache-2.0).

    semmoe simulate cluster=h200x8 model=deepseek-v3 cost.silicon=h200_sxm      (pip install 'semmoe[silicon]')

`cost.silicon` names a system of the package (A100 to GB300) or a folder of the same layout. What it holds for the model's
shape replaces the cluster's own figures: NCCL curves, the expert law (fitted to the balanced fused-MoE rows of one rank
that holds all experts), the law of dense products (fitted to GEMM rows), attention kernels, DeepEP low-latency tables.
Links between nodes, datasheet peaks and host terms stay the cluster's. Of several engines the first of ENGINES that has
rows counts, in its newest version.

The layout is DATA/OPERATOR/ENGINE/VERSION/*.parquet. NCCL's message_size counts elements of its dtype, latencies are
milliseconds (DeepEP: microseconds). Prefill rows with earlier KV (step > 0) and sliding windows are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semmoe.errors import UserError, nearest
from semmoe.specs import DTYPE_BYTES, ClusterSpec, Curve, ModelSpec

from .cost.dense import fit_gemm
from .cost.experts import fit_expert_law

PACKAGE = "aiconfigurator_core"
ENGINES = ("vllm", "sglang", "trtllm")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
MOE_DTYPES = {"bf16": ("bfloat16",), "fp16": ("bfloat16",), "fp8": ("fp8_block", "fp8"), "mxfp4": ("w4a16_mxfp4",)}
GEMM_DTYPES = {"bf16": ("bfloat16",), "fp16": ("bfloat16",), "fp8": ("fp8_block", "fp8")}
GEMM_SMALLEST = 512  # rows and columns of a matrix from which on it is fitted; smaller ones are all launch
FITTED = ("experts", "gemm")
ONE_NODE_RANKS = {"gb200": 4, "gb300": 4}  # ranks of a node in the DeepEP tables, 8 elsewhere


def silicon_cluster(cluster: ClusterSpec, model: ModelSpec, system: str, allow_missing: bool = False) -> ClusterSpec:
    """The cluster with the database's figures. UserError where collectives or experts of this shape were not measured,
    unless allow_missing, which keeps the cluster's own."""
    folder = system_folder(system)
    found: dict[str, Any] = {
        "curves": collective_curves(folder),
        "experts": expert_terms(folder, cluster, model),
        "gemm": gemm_terms(folder, cluster, model),
        "attention": attention_tables(folder, model),
        "deepep": deepep_tables(folder, model),
    }
    absent = [name for name in ("curves", "experts") if not found[name]]
    if absent and not allow_missing:
        raise UserError(
            f"cost.silicon={system}: no {' and no '.join(absent)} for {model.name} (hidden {model.hidden}, expert width "
            f"{model.expert_ffn}, top-{model.top_k} of {model.num_experts}, {model.expert_dtype}); "
            f"{shapes_held(folder, model)}; cost.allow_roofline=true keeps the cluster's own figures"
        )
    said = f"{_words()}, {folder.name}"
    changes: dict[str, Any] = {name: found[name] for name in ("curves", "gemm", "attention", "deepep") if found[name]}
    if found["deepep"]:
        changes["deepep"] = cluster.deepep | found["deepep"]
    if found["experts"]:
        changes |= found["experts"] | {"expert_grid": (), "expert_grid_shape": ()}
    told = {name: f"{'fitted' if name in FITTED else 'measured'} {said}" for name, value in found.items() if value}
    return replace(cluster, provenance=cluster.provenance | told, **changes)


def system_folder(system: str) -> Path:
    """Folder of a system's tables; UserError that names what there is."""
    if Path(system).is_dir():
        return Path(system)
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"cost.silicon={system} needs the measured database: pip install 'semmoe[silicon]'")
    data = Path(spec.submodule_search_locations[0]) / "systems" / "data"
    known = sorted(path.name for path in data.iterdir() if path.is_dir())
    if system not in known:
        raise UserError(f"cost.silicon={system}: no such system{nearest(system, known)}")
    return data / system


def collective_curves(folder: Path) -> tuple[Curve, ...]:
    """NCCL curves in half precision, of the newest version."""
    table = _newest(folder / "comm" / "nccl", "nccl_perf.parquet", {"nccl_dtype": ("half",), "op_name": OPS})
    if table is None:
        return ()
    curves = []
    for (op, ranks), rows in table.groupby(["op_name", "num_gpus"]):
        us = (1e3 * rows.groupby("message_size").latency.median()).sort_index()
        sizes = tuple(2.0 * size for size in us.index)  # elements of two bytes
        curves.append(Curve(op=str(op), ranks=int(str(ranks)), bytes=sizes, latency_us=tuple(us)))
    return tuple(curves)


def expert_terms(folder: Path, cluster: ClusterSpec, model: ModelSpec) -> dict[str, float]:
    """Fields of the expert law, fitted to this shape's rows; {}: not measured."""
    shape: dict[str, Iterable[Any]] = {
        "hidden_size": (model.hidden,),
        "inter_size": (model.expert_ffn,),
        "topk": (model.top_k,),
    }
    shape |= {
        "num_experts": (model.num_experts,),
        "moe_ep_size": (1,),
        "moe_tp_size": (1,),
        "distribution": ("balanced",),
    }
    for dtype in MOE_DTYPES.get(model.expert_dtype, ()):
        table = _of_engines(folder / "moe", "moe_perf.parquet", shape | {"moe_dtype": (dtype,)})
        if table is not None:
            break
    else:
        return {}
    us = 1e3 * table.groupby("num_tokens").latency.min()  # the best kernel of several
    rows = model.top_k * us.index.to_numpy(dtype=float)
    points = list(zip(rows, rows.clip(max=model.num_experts), us, strict=True))
    tflops = cluster.fp8_tflops if model.expert_dtype == "fp8" and cluster.fp8_tflops else cluster.bf16_tflops
    law = fit_expert_law(points, model.hidden, model.expert_ffn, cluster.memory_gbps, tflops, model.expert_bytes)
    terms = {"memory_efficiency": law.memory_efficiency, "max_mfu": law.max_mfu, "mfu_half_rows": law.half_rows}
    return {name: float(value) for name, value in (terms | {"expert_floor_us": law.floor_us}).items()}


def gemm_terms(folder: Path, cluster: ClusterSpec, model: ModelSpec) -> dict[str, float]:
    """`ClusterSpec.gemm`, fitted to the best kernel of every measured shape; {}: not measured."""
    for dtype in GEMM_DTYPES.get(model.weight_dtype, ()):
        table = _of_engines(folder / "gemm", "gemm_perf.parquet", {"gemm_dtype": (dtype,)})
        if table is not None:
            table = table[(table.n >= GEMM_SMALLEST) & (table.k >= GEMM_SMALLEST)]
            best = table.groupby(["m", "n", "k"], as_index=False).latency.min()
            points = np.column_stack([best.m, best.n * best.k, 1e3 * best.latency])
            return fit_gemm(points, cluster.memory_gbps, cluster.bf16_tflops, DTYPE_BYTES[model.weight_dtype])
    return {}


def attention_tables(folder: Path, model: ModelSpec) -> tuple[dict[str, Any], ...]:
    """Prefill and decode kernels of this model's heads, for attention-DP."""
    if model.attention == "mla":
        operator, names = "mla", ("context_mla_perf.parquet", "generation_mla_perf.parquet")
        shape: dict[str, Iterable[Any]] = {"num_heads": (model.num_heads,), "mla_dtype": ("bfloat16",)}
    else:
        operator, names = "attention", ("context_attention_perf.parquet", "generation_attention_perf.parquet")
        shape = {"num_heads": (model.num_heads,), "head_dim": (model.head_dim,), "window_size": (0,)}
        shape |= {"num_key_value_heads": (model.num_kv_heads,), "attn_dtype": ("bfloat16",)}
    made = []
    for phase, name in zip(("prefill", "decode"), names, strict=True):
        first = {"step": (0,)} if phase == "prefill" else {}
        table = _of_engines(folder / operator, name, shape | {"kv_cache_dtype": ("bfloat16",)} | first)
        if table is None:
            continue
        length = table.isl + table.step
        us = 1e3 * table.latency.groupby([table.batch_size, length]).median()
        batch, lengths = zip(*us.index, strict=True)
        heads = {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        columns = {"batch": list(batch), "length": list(lengths), "us": us.tolist()}
        made.append({"kind": model.attention, "phase": phase} | heads | columns)
    return tuple(made)


def deepep_tables(folder: Path, model: ModelSpec) -> dict[str, Any]:
    """DeepEP low latency over one node."""
    shape = {"hidden_size": (model.hidden,), "num_topk": (model.top_k,), "num_experts": (model.num_experts,)}
    where = folder / "comm" / "sglang"
    table = _newest(where, "wideep_deepep_ll_perf.parquet", shape | {"node_num": (1,)})
    if table is None:
        return {}
    us = table.groupby("num_token")[["dispatch_avg_t_us", "combine_avg_t_us"]].median().sort_index()
    shape_words = {"hidden": model.hidden, "top_k": model.top_k, "num_experts": model.num_experts}
    columns = {"dispatch_us": us.dispatch_avg_t_us.tolist(), "combine_us": us.combine_avg_t_us.tolist()}
    ranks = ONE_NODE_RANKS.get(folder.name, 8)
    return {"low_latency": {"ranks": ranks, **shape_words, "tokens_per_rank": us.index.tolist(), **columns}}


def shapes_held(folder: Path, model: ModelSpec) -> str:
    """Words on the expert shapes that the database does hold, the closest first."""
    shapes: set[tuple[int, ...]] = set()
    for path in sorted(folder.glob("moe/*/*/moe_perf.parquet")):
        columns = ["hidden_size", "inter_size", "topk", "num_experts"]
        shapes |= {tuple(int(x) for x in row) for row in _read(path)[columns].drop_duplicates().to_numpy()}
    ours = (model.hidden, model.expert_ffn, model.top_k, model.num_experts)
    close = sorted(shapes, key=lambda s: sum(abs(a / b - 1) for a, b in zip(s, ours, strict=True)))[:3]
    return "held (hidden, width, top-k, experts): " + (", ".join(map(str, close)) or "none")


def _of_engines(folder: Path, name: str, keep: Mapping[str, Iterable[Any]]) -> pd.DataFrame | None:
    for engine in ENGINES:
        table = _newest(folder / engine, name, keep)
        if table is not None:
            return table
    return None


def _newest(folder: Path, name: str, keep: Mapping[str, Iterable[Any]]) -> pd.DataFrame | None:
    """Rows with these values from the newest version that has any."""
    for path in sorted(folder.glob(f"*/{name}"), key=lambda p: _order(p.parent.name), reverse=True):
        table = _read(path)
        for column, values in keep.items():
            if column in table.columns:
                table = table[table[column].isin(list(values))]
        if len(table):
            return table
    return None


def _order(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", name))


@cache
def _read(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError:
        raise UserError("reading the measured database needs pyarrow: pip install 'semmoe[silicon]'") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable Parquet table ({error})") from None


def _words() -> str:
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')}"
    except ModuleNotFoundError:
        return "a folder of aiconfigurator-core's layout"
