"""From raw samples of single operations to the content of a cluster file, and how well it describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.dispatch import METADATA_BYTES
from semmoe.run import Run
from semmoe.specs import DTYPE_BYTES

from .collectives import META_INTS, OPENING, Case
from .skew import fit_skew

Float = NDArray[np.float64]

# curve names of a transport operation, as the cost model looks them up
CURVE_NAMES = {
    "dispatch": ("dispatch.a2a_dedup", "dispatch.a2a_assignment"),
    "combine": ("combine.a2a_dedup", "combine.a2a_assignment"),
    "gather_rows": ("dispatch.allgather_rs",),
    "reduce_rows": ("combine.allgather_rs",),
    "dispatch_slots": ("dispatch.low_latency",),
    "combine_slots": ("combine.low_latency",),
}
ALIKE = 3.0  # standard errors that a mean may lie beside the line


@dataclass(eq=False)
class Samples:
    """Microseconds. collectives[case, ranks][sample]: calls in a row, slowest rank; opening: the first two after a barrier.
    experts[active, rows each]: (CPU while all ranks work, wall of the slowest), means; local[what, tokens]: (rows
    handled, mean); attention[name][tokens, entries, prefill pairs, decode keys]: mean of one block (empty: not the tiny
    model); raw[operation][rank][sample]: of local work. pools: of ranks, each gave an equal part of the samples, in turn."""

    collectives: dict[tuple[Case, int], list[float]] = field(default_factory=dict)
    opening: dict[tuple[Case, int], list[float]] = field(default_factory=dict)
    raw: dict[tuple[Any, ...], list[list[float]]] = field(default_factory=dict)
    experts: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    local: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    attention: dict[str, dict[tuple[int, int, int, int], float]] = field(default_factory=dict)
    blocks: dict[str, dict[tuple[int, int, int, int], float]] = field(
        default_factory=dict
    )  # the same by name, any model
    machine: dict[str, float] = field(default_factory=dict)
    pools: int = 1


def cluster_dict(run: Run, samples: Samples, cores: int, memory_gib: float, when: str) -> dict[str, Any]:
    """The content of the cluster file (see ClusterSpec.from_dict)."""
    ranks = run.ep_size
    host_us, per_row_ns = fit_local(samples)
    block_us, work_ns = fit_attention(samples)
    host_us, per_row_ns = host_us | block_us, per_row_ns | work_ns
    for name, points in samples.blocks.items():
        fixed, *by_work = linear_in_work(points)
        host_us[name] = fixed
        per_row_ns |= {block_term(name, work): 1e3 * by for work, by in zip(BLOCK_WORK, by_work, strict=True)}
    host_us["barrier"] = steady(samples.collectives[Case("barrier", 0), ranks]) if ranks > 1 else 0.0
    host_us["start"] = start_us(samples, ranks)
    weights = fit_skew(balanced_and_skewed(samples, ranks), ranks)
    curves = curves_of(samples, ranks, run)
    slowest = [c for c in curves if c["op"] == "alltoall" and c["ranks"] == ranks]
    last = slowest[0] if slowest else {"bytes": [1.0], "latency_us": [1.0]}
    said = (
        f"measured {when}, {ranks} processes on {cores} cores, started {samples.pools} times, {run.cfg['transport']['name']}, "
        f"{run.spec.activation_dtype}"
    )
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
        "skew": {name: round(value, 4) for name, value in weights.items()},
        "curves": curves,
        "expert_grid": [[a * r, a, round(us[0], 3)] for (a, r), us in sorted(samples.experts.items())],
        "expert_grid_shape": [run.model.hidden, run.model.expert_ffn],
        "provenance": {
            "all": said,
            "host": said + "; CPU time of a rank's thread, plan: wall of all ranks at once",
            "curves": said + "; mean over samples of the slowest rank, calls in a row",
            "experts": said + "; CPU time while all ranks work, after other work",
            "skew": said + "; weights of the busiest port and pair, fitted to skewed exchanges",
            "link": f"fitted to {said}: copies between processes of one machine, no link",
        },
    }


def start_us(samples: Samples, ranks: int) -> float:
    """What two exchanges after a barrier take beyond two of many in a row: ranks leave it late, and end apart."""
    calls = {key: OPENING * steady(us) for key, us in samples.collectives.items()}
    extra = [steady(us) - calls[key] for key, us in samples.opening.items() if key[1] == ranks]
    return max(float(np.median(extra)), 0.0) if extra else 0.0


def balanced_and_skewed(samples: Samples, ranks: int) -> dict[Case, float]:
    """Mean microseconds of every case over all ranks."""
    return {case: steady(us) for (case, members), us in samples.collectives.items() if members == ranks}


def curves_of(samples: Samples, ranks: int, run: Run) -> list[dict[str, Any]]:
    """Curves of all balanced collectives, see `smoothed`."""
    points: dict[tuple[str, int], list[tuple[float, list[float]]]] = {}
    for (case, members), us in samples.collectives.items():
        if not case.skew and case.op != "barrier":
            size = size_bytes(case.op, case.rows, members, run)
            points.setdefault((case.op, members), []).append((size, us))
    curves = []
    for (op, members), measured in points.items():
        sizes, us_CS = zip(*sorted(measured), strict=True)
        smooth = smoothed(np.array(sizes), us_CS)
        for name in CURVE_NAMES.get(op, (op,)):
            curves.append(
                {
                    "op": name,
                    "ranks": members,
                    "bytes": [float(s) for s in sizes],
                    "latency_us": [round(float(t), 2) for t in smooth],
                }
            )
    return curves


def smoothed(sizes: Float, us_CS: Sequence[Sequence[float]]) -> Float:
    """Microseconds at each size: latency + bytes / bandwidth where the samples cannot tell that line from their means, else
    the nearest non-decreasing sequence, which takes the lowest of noisy points for the small sizes, the highest for the large.
    """
    from scipy.optimize import nnls

    kept_CS = [undisturbed(us) for us in us_CS]
    means = np.array([us_S.mean() for us_S in kept_CS])
    doubt = np.array([us_S.std() / len(us_S) ** 0.5 for us_S in kept_CS])
    (latency, by), _ = nnls(np.stack([1 / means, sizes / means], axis=1), np.ones(len(means)))
    line = latency + by * sizes
    return line if (np.abs(line - means) <= ALIKE * doubt).all() else isotonic(means)


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
        rows, us = points_of(samples, what)
        (fixed, slope), _ = nnls(np.stack([1 / us, rows / us], axis=1), np.ones(len(us)))
        host_us[what], per_row_ns[what] = float(fixed), float(slope * 1e3)
    return host_us, per_row_ns


def fit_attention(samples: Samples) -> tuple[dict[str, float], dict[str, float]]:
    """(host_us, per_row_ns) of attention blocks: fixed, and by token, request, prefill pair and key of a decode."""
    host_us: dict[str, float] = {}
    per_row_ns: dict[str, float] = {}
    for name, points in samples.attention.items():
        fixed, *by_work = linear_in_work(points)
        block, *terms = attention_terms(name)
        host_us[block] = fixed
        per_row_ns |= {term: 1e3 * by for term, by in zip(terms, by_work, strict=True)}
    return host_us, per_row_ns


def attention_terms(name: str) -> list[str]:
    """ "attention.tp4" -> ["attention.block.tp4", "attention.token.tp4", ...]: the fixed term, then those of the work."""
    return [name.replace("attention", f"attention.{part}", 1) for part in ("block", *BLOCK_WORK)]


BLOCK_WORK = ("token", "sequence", "pair", "kv")


def block_term(name: str, work: str) -> str:
    """ "blocks.attention.tiny.tp4", "pair" -> "blocks.pair.tiny.tp4"."""
    return name.replace("blocks.attention", f"blocks.{work}", 1)


def linear_in_work(points: Mapping[tuple[int, int, int, int], float]) -> list[float]:
    """Microseconds: fixed, then by each of the four parts of the work. Least squares of the relative error, none below 0."""
    from scipy.optimize import nnls

    work, us = np.array(list(points), dtype=np.float64), np.array(list(points.values()))
    terms, _ = nnls(np.column_stack([np.ones(len(us)), work]) / us[:, None], np.ones(len(us)))
    return [float(term) for term in terms]


def points_of(samples: Samples, what: str) -> tuple[Float, Float]:
    """(rows handled, microseconds) of one term of local work."""
    rows, us = np.array([value for key, value in samples.local.items() if key[0] == what]).T
    return rows, us


def steady(values: Sequence[float]) -> float:
    """Mean of what is undisturbed."""
    return float(undisturbed(values).mean())


def undisturbed(values: Sequence[float]) -> Float:
    """Without what took more than three times the median: another process had the machine."""
    array = np.asarray(values, dtype=np.float64)
    return array[array <= 3 * np.median(array)]


def isotonic(values: Float) -> Float:
    """The nearest non-decreasing sequence (pool adjacent violators). Worked example: [1, 3, 2, 4] -> [1, 2.5, 2.5, 4]."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (b, n), (a, m) = blocks.pop(), blocks.pop()
            blocks.append(((a * m + b * n) / (m + n), m + n))
    return np.concatenate([np.full(count, mean) for mean, count in blocks])
