"""Calibrate: single operations of this machine's ranks, measured and written as a cluster file.

What is timed: every transport operation at several sizes (balanced, and skewed as a check), the experts over a grid,
gate, index work and planning by rows. Never a composed layer. Names of the terms are those that the cost model
documents: curves "dispatch.a2a_dedup", "srs", ...; host_us / per_row_ns "gate", "permute.a2a_dedup", "plan.tp_shuffled".
Sizes of curves count bytes as nccl-tests does: of balanced traffic, the bytes that leave a rank * n / (n - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import METADATA_BYTES, DispatchSpec
from semmoe.planning import StepPlanner
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.run import Run
from semmoe.schedule.semantic import Semantic
from semmoe.specs import DTYPE_BYTES

from .layer import build_layers
from .pool import Pool
from .reference.gate import Gating
from .single_local import time_experts, time_index_work, time_machine, time_planning
from .single_ops import META_INTS, time_collectives
from .stack import open_transport
from .transport.codec import torch_dtype
from .weights import RandomWeights
from .worker import RankContext

HOME_OPS = ("srs", "sag", "reduce_scatter", "all_gather", "all_reduce", "gather_rows", "reduce_rows")
EXCHANGES = ("dispatch", "combine", "alltoall")
SLOT_OPS = ("dispatch_slots", "combine_slots")
# curve names of a transport operation, as the cost model looks them up
CURVE_NAMES = {
    "dispatch": ("dispatch.a2a_dedup", "dispatch.a2a_assignment"),
    "combine": ("combine.a2a_dedup", "combine.a2a_assignment"),
    "gather_rows": ("dispatch.allgather_rs",),
    "reduce_rows": ("combine.allgather_rs",),
    "dispatch_slots": ("dispatch.low_latency",),
    "combine_slots": ("combine.low_latency",),
}
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured. Rows: tokens at home on a rank, or rows that leave a rank, or places a pair of ranks."""

    home_rows: tuple[int, ...] = (4, 32, 128, 512)
    sent_rows: tuple[int, ...] = (6, 60, 240, 960)
    places: tuple[int, ...] = (32, 512)
    rows_per_expert: tuple[int, ...] = (1, 8, 32, 128)
    local_tokens: tuple[int, ...] = (8, 32, 128, 384)
    planned_tokens: tuple[int, ...] = (64, 256, 1024)
    samples: int = 10
    inner: int = 4
    local_samples: int = 15


QUICK = Effort()
THOROUGH = Effort(
    home_rows=(1, 4, 16, 64, 128, 256, 512, 2048),
    sent_rows=(3, 12, 60, 120, 240, 480, 960, 3840),
    samples=30,
    local_samples=40,
)


@dataclass(eq=False)
class Samples:
    """Raw microseconds. collectives[op, rows, skew, ranks][sample]: slowest rank; experts[active, rows each]: (CPU of
    all at once, wall of all at once, CPU alone), mean over samples; local[what, tokens]: (rows handled, mean)."""

    collectives: dict[tuple[str, int, float, int], list[float]] = field(default_factory=dict)
    experts: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)
    local: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)


def collect(
    pool: Pool, run: Run, effort: Effort = QUICK, progress: Progress = lambda what, done, total: None
) -> Samples:
    """Measure everything on the pool. run: gives the model's shape, ranks, placement, dtype and traces."""
    samples = Samples()
    hidden, transport = run.model.hidden, str(run.cfg["transport"]["name"])
    for members, cases in _collective_cases(effort, pool.ranks):
        parts = pool.run(
            time_collectives,
            transport,
            cases,
            hidden,
            effort.samples,
            effort.inner,
            members,
            progress=lambda done, total: progress("collectives", done, total),
        )
        for case in cases:
            per_rank = np.array([part[case] for part in parts[:members]])
            samples.collectives[(*case, members)] = per_rank.max(axis=0).tolist()
    parts = pool.run(local_work_task, run, effort, progress=lambda done, total: progress("local work", done, total))
    together = [part["together"] for part in parts]
    for key in together[0]:
        cpu, wall = ([float(np.mean(part[key][i])) for part in together] for i in (0, 1))
        samples.experts[key] = (float(np.mean(cpu)), max(wall), float(np.mean(parts[0]["alone"][key][0])))
    for key in parts[0]["index"]:
        rows, us = zip(*(part["index"][key] for part in parts), strict=True)
        samples.local[key] = (float(np.mean(rows)), float(np.mean([_steady(u) for u in us])))
    for key in parts[0]["plan"]:  # all ranks plan the same step: the slowest counts
        samples.local[key] = (float(key[1]), max(_steady(part["plan"][key][1]) for part in parts))
    samples.machine = parts[0]["machine"]
    return samples


def _collective_cases(effort: Effort, ranks: int) -> list[tuple[int, list[tuple[str, int, float]]]]:
    """(members, cases): everything over all ranks, the raw all-to-all and all-reduce over two."""
    full = [(op, rows, 0.0) for op in HOME_OPS for rows in effort.home_rows]
    full += [(op, rows, 0.0) for op in EXCHANGES for rows in effort.sent_rows]
    full += [(op, rows, 0.0) for op in SLOT_OPS for rows in effort.places]
    full += [(op, effort.sent_rows[2], 0.5) for op in ("dispatch", "combine")]
    full += [(op, effort.home_rows[2], 0.5) for op in ("srs", "sag")]
    full += [("barrier", 0, 0.0)]
    if ranks <= 2:
        return [(ranks, full)] if ranks > 1 else []
    return [(ranks, full), (2, [(op, rows, 0.0) for op in ("alltoall", "all_reduce") for rows in effort.home_rows])]


def local_work_task(context: RankContext, run: Run, effort: Effort) -> dict[str, Any]:
    """Task of every rank: experts, index work, planning and the machine's own rates, each in a loop of its own."""
    placement, source = run.fitted.placement, RandomWeights(run.model, 1.0, int(run.cfg["seed"]))
    transport = open_transport(context, "collective")
    flows: tuple[tuple[str, str | None], ...] = (
        ("dp", "a2a_dedup"),
        ("dp", "a2a_assignment"),
        ("dp", "allgather_rs"),
        ("dp", "low_latency"),
        ("tp_replicated", None),
    )
    layers = {}
    for flow, dispatcher in flows:
        spec = _spec(run, flow, dispatcher)
        (layer,) = build_layers(
            transport, spec, placement, source, Gating.of(run.model), max_tokens=max(effort.local_tokens), layers=[0]
        )
        layers[dispatcher or flow] = layer
    first = layers["a2a_dedup"]
    grid = expert_grid_points(placement.slots_per_rank, effort.rows_per_expert)
    predictor = TokenTable()
    predictor.fit(Profile.fit(run.train))
    planner = StepPlanner(
        run.heldout,
        placement,
        _spec(run, "tp_shuffled", "a2a_dedup"),
        Semantic(),
        predictor,
        run.recipe.make_replica_router() if placement.has_replicas else None,
        run.recipe.home_cap,
    )
    return {
        "index": time_index_work(context, layers, effort.local_tokens, effort.local_samples),
        "together": time_experts(context, first, grid, effort.local_samples, alone=False),
        "alone": time_experts(context, first, grid, effort.local_samples, alone=True),
        "plan": time_planning(context, planner, effort.planned_tokens, effort.local_samples),
        "machine": time_machine(context, torch_dtype(run.spec.activation_dtype), effort.local_samples),
    }


def _spec(run: Run, flow: str, dispatcher: str | None) -> DispatchSpec:
    return DispatchSpec(
        flow=flow,
        dispatcher=dispatcher,
        hidden=run.model.hidden,
        top_k=run.model.top_k,
        activation_dtype=run.spec.activation_dtype,
    )


def expert_grid_points(slots_per_rank: int, rows_per_expert: Sequence[int]) -> list[tuple[int, int]]:
    """(active experts, rows of each): 1, 2, 4, ... and all slots of a rank, times every number of rows."""
    active = sorted({2**i for i in range(slots_per_rank.bit_length()) if 2**i < slots_per_rank} | {slots_per_rank})
    return [(a, r) for a in active for r in rows_per_expert]


def cluster_dict(run: Run, samples: Samples, cores: int, memory_gib: float, when: str) -> dict[str, Any]:
    """The content of the cluster file (see ClusterSpec.from_dict)."""
    ranks = run.ep_size
    host_us, per_row_ns = fit_local(samples)
    host_us["barrier"] = float(np.mean(samples.collectives["barrier", 0, 0.0, ranks])) if ranks > 1 else 0.0
    curves = curves_of(samples, ranks, run)
    slowest = [c for c in curves if c["op"] == "alltoall" and c["ranks"] == ranks]
    last = slowest[0] if slowest else {"bytes": [1.0], "latency_us": [1.0]}
    said = f"measured {when}, {ranks} processes on {cores} cores, {run.cfg['transport']['name']}, {run.spec.activation_dtype}"
    return {
        "name": run.cluster.name,
        "nodes": 1,
        "ranks_per_node": ranks,
        "topology": "shared_memory",
        "memory_gib": round(memory_gib / ranks, 3),
        "memory_gbps": round(samples.machine["memory_gbps"], 3),
        "bf16_tflops": round(samples.machine["tflops"], 5),
        "link_gbps": round(last["bytes"][-1] / last["latency_us"][-1] / 1e3, 6),
        "alpha_us": round(min(last["latency_us"]), 2),
        "cores": cores,
        "host_us": {name: round(value, 3) for name, value in host_us.items()},
        "per_row_ns": {name: round(value, 3) for name, value in per_row_ns.items()},
        "curves": curves,
        "expert_grid": [[a * r, a, round(us[0], 3)] for (a, r), us in sorted(samples.experts.items())],
        "expert_grid_shape": [run.model.hidden, run.model.expert_ffn],
        "provenance": {
            "all": said,
            "host": said + "; CPU time of a rank's thread, plan: wall of all ranks at once",
            "curves": said + "; mean over samples of the slowest rank, calls in a row",
            "experts": said + "; CPU time while all ranks work",
            "skew": said,
            "link": f"fitted to {said}: copies between processes of one machine, no link",
        },
    }


def curves_of(samples: Samples, ranks: int, run: Run) -> list[dict[str, Any]]:
    """Curves of all balanced collectives, made non-decreasing in size (what goes down is noise)."""
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (op, rows, skew, members), us in samples.collectives.items():
        if skew == 0.0 and op != "barrier":
            points.setdefault((op, members), []).append((size_bytes(op, rows, members, run), _steady(us)))
    curves = []
    for (op, members), measured in points.items():
        sizes, times = np.array(sorted(measured)).T
        rising = isotonic(times)
        for name in CURVE_NAMES.get(op, (op,)):
            curves.append(
                {
                    "op": name,
                    "ranks": members,
                    "bytes": [float(s) for s in sizes],
                    "latency_us": [round(float(t), 2) for t in rising],
                }
            )
    return curves


def size_bytes(op: str, rows: int, ranks: int, run: Run) -> float:
    """Size of a balanced operation in nccl-tests' count."""
    row = run.model.hidden * DTYPE_BYTES[run.spec.activation_dtype]
    share = ranks / (ranks - 1)
    if op == "dispatch":
        return rows * (row + 1.5 * METADATA_BYTES) * share
    if op in ("combine", "alltoall"):
        return rows * row * share
    if op == "gather_rows":
        return rows * ranks * (row + 4 * META_INTS)
    if op == "dispatch_slots":
        return rows * ranks * (row + METADATA_BYTES)
    return rows * ranks * row  # home operations and combine_slots: every rank's rows


def fit_local(samples: Samples) -> tuple[dict[str, float], dict[str, float]]:
    """(host_us, per_row_ns) of gate, permute and plan: least squares of the relative error, both terms >= 0."""
    from scipy.optimize import nnls

    host_us: dict[str, float] = {}
    per_row_ns: dict[str, float] = {}
    for what in dict.fromkeys(key[0] for key in samples.local):
        rows, us = _points(samples, what)
        (fixed, slope), _ = nnls(np.stack([1 / us, rows / us], axis=1), np.ones(len(us)))
        host_us[what], per_row_ns[what] = float(fixed), float(slope * 1e3)
    return host_us, per_row_ns


def _points(samples: Samples, what: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rows, us = np.array([value for key, value in samples.local.items() if key[0] == what]).T
    return rows, us


def _steady(values: Sequence[float]) -> float:
    """Mean without what took more than three times the median: another process had the machine."""
    array = np.asarray(values, dtype=np.float64)
    return float(array[array <= 3 * np.median(array)].mean())


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest non-decreasing sequence (pool adjacent violators). Worked example: [1, 3, 2, 4] -> [1, 2.5, 2.5, 4]."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return np.concatenate([np.full(count, mean) for mean, count in blocks])


def residuals(samples: Samples, cluster: dict[str, Any], ranks: int) -> list[tuple[str, float, str]]:
    """(what, figure, meaning) of how well the file describes its own samples."""
    found: list[tuple[str, float, str]] = []
    for (op, rows, skew, members), us in samples.collectives.items():
        if skew and members == ranks:
            balanced = _steady(samples.collectives[op, rows, 0.0, members])
            found.append((f"{op}, half of all to one rank", _steady(us) / balanced, "x the balanced time"))
    spread = [np.std(us) / np.mean(us) for key, us in samples.collectives.items() if key[3] == ranks]
    if spread:
        found.append(("collectives, spread of samples", float(np.median(spread)), "median of std / mean"))
    for what in cluster["host_us"]:
        if what in cluster["per_row_ns"]:
            handled, taken_us = _points(samples, what)
            fit_us = cluster["host_us"][what] + cluster["per_row_ns"][what] * handled / 1e3
            found.append((f"{what}, linear fit", float(np.abs(fit_us / taken_us - 1).max()), "largest relative error"))
    cores = max(int(cluster["cores"]), 1)
    rule = [wall / (cpu * max(ranks / cores, 1.0)) for cpu, wall, _ in samples.experts.values()]
    found.append(("experts, all ranks at once", float(np.median(rule)), "x the rule sum over ranks / cores"))
    shared = [cpu / alone for cpu, _, alone in samples.experts.values()]
    found.append(("experts, CPU time beside others", float(np.median(shared)), "x the CPU time alone"))
    return found
