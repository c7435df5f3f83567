"""Calibrate: single operations of this machine's ranks, measured and written as a cluster file.

What is timed: every transport operation at several sizes, balanced and skewed, the experts over a grid, gate, index work
and planning by rows; attention, dense layers, shared experts and LM head of the model, all heads and a share; of
the tiny model also those of its served requests, all heads and a share. Never a composed layer; but each as a layer meets it,
after other work rather than in a loop of its own (rotation.py). Pools of ranks are started one after another: an exchange
takes longer in one pool than in the next, by a fifth where ranks share cores, and nobody knows the pool to predict.
Names of the terms are those that the cost model documents: curves "dispatch.a2a_dedup", "srs", ...; host_us and
per_row_ns "gate", "permute.a2a_dedup", "plan.semantic", "plan.paper", "attention.token", "head"; host_us.start; skew
"dispatch.port".
Sizes of curves count bytes as nccl-tests does: of balanced traffic, the bytes that leave a rank * n / (n - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from semmoe.dispatch import DispatchSpec
from semmoe.run import Run
from semmoe.specs import DTYPE_BYTES

from ..environment import usable_cores
from ..layer import build_layers
from ..pool import Pool
from ..reference.gate import Gating
from ..stack import open_transport
from ..transport.codec import torch_dtype
from ..weights import RandomWeights
from ..worker import RankContext
from .attention import attention_operations, end_operations, is_tiny
from .blocks import block_operations
from .collectives import Case, Work, per_call, time_collectives
from .fit import Samples, steady
from .local_work import expert_operations, gate_operations, permute_operations, time_machine
from .planning import PARTS, Points, plan_operations, planning_terms
from .rotation import burnt_memory, in_a_layer, rotate
from .skew import skewed_cases

HOME_OPS = ("srs", "sag", "reduce_scatter", "all_gather", "all_reduce", "gather_rows", "reduce_rows")
EXCHANGES = ("dispatch", "combine", "alltoall")
SLOT_OPS = ("dispatch_slots", "combine_slots")
INDEX_WORK = (  # (flow, dispatcher) whose packing and sorting is timed
    ("dp", "a2a_dedup"),
    ("dp", "a2a_assignment"),
    ("dp", "allgather_rs"),
    ("dp", "low_latency"),
    ("tp_replicated", None),
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured. Rows: tokens at home on a rank, or rows that leave a rank, or places a pair of ranks."""

    home_rows: tuple[int, ...] = (4, 32, 128, 512)
    sent_rows: tuple[int, ...] = (6, 60, 240, 960)
    places: tuple[int, ...] = (32, 512)
    rows_per_expert: tuple[int, ...] = (1, 8, 32, 128)
    local_tokens: tuple[int, ...] = (8, 32, 128, 384)
    planned_tokens: tuple[int, ...] = (64, 512, 2048)
    entries: tuple[int, ...] = (1, 4, 16)  # requests of a rank in a step, for LM head and bookkeeping
    pools: int = 3  # of ranks, started one after another; each takes the samples below
    samples: int = 4
    inner: int = 8  # calls in a row, more than the OPENING ones, which are kept apart
    local_samples: int = 4


QUICK = Effort()
THOROUGH = Effort(
    home_rows=(1, 4, 16, 64, 128, 256, 512, 2048),
    sent_rows=(3, 12, 60, 120, 240, 480, 960, 3840),
    pools=6,
)
EFFORTS = {"quick": QUICK, "thorough": THOROUGH}


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one pool of ranks measured. parts[rank]: of `local_work_task`; microseconds of collectives as in Samples."""

    parts: list[dict[str, Any]]
    collectives: dict[tuple[Case, int], list[float]] = field(default_factory=dict)
    opening: dict[tuple[Case, int], list[float]] = field(default_factory=dict)


def collect(
    pool: Pool,
    run: Run,
    effort: Effort,
    predictors: dict[str, Any],
    progress: Progress = lambda what, done, total: None,
) -> Taken:
    """Measure everything on the pool. run: gives the model's shape, ranks, placement, dtype and traces."""
    parts = pool.run(
        local_work_task, run, effort, predictors, progress=lambda done, total: progress("local work", done, total)
    )
    taken = Taken(parts=parts)
    busy_us = work_between_collectives_us(samples_of([taken], run.model.num_moe_layers), effort)
    row_bytes = run.model.hidden * DTYPE_BYTES[run.spec.activation_dtype]
    layer_bytes = int(3 * run.model.expert_ffn * row_bytes) * run.fitted.placement.slots_per_rank
    for members, cases in _collective_cases(effort, pool.ranks):
        ends = pool.run(
            time_collectives,
            str(run.cfg["transport"]["name"]),
            cases,
            run.model.hidden,
            effort.samples,
            effort.inner,
            members,
            Work(busy_us, layer_bytes, ranks_per_core=-(-members // usable_cores())),
            progress=lambda done, total: progress("collectives", done, total),
        )
        for case in cases:
            opening_S, call_S = per_call(np.array([end[case] for end in ends[:members]]), effort.inner)
            taken.opening[case, members], taken.collectives[case, members] = opening_S.tolist(), call_S.tolist()
    return taken


def samples_of(pools: Sequence[Taken], layers: int) -> Samples:
    """Samples of all pools together; of local work also means over samples and ranks. layers: MoE layers of the model."""
    samples = Samples(pools=len(pools))
    for taken in pools:
        for key, us in taken.collectives.items():
            samples.collectives.setdefault(key, []).extend(us)
            samples.opening.setdefault(key, []).extend(taken.opening[key])
    parts = pools[0].parts
    handled = {key: float(np.mean([part["handled"][key] for part in parts])) for key in parts[0]["handled"]}
    planning: Points = {}
    for key in parts[0]["times"]:
        times_GS2 = np.concatenate([[part["times"][key] for part in taken.parts] for taken in pools], axis=1)
        cpu_GS, wall_GS = times_GS2[..., 0], times_GS2[..., 1]
        planned = key[0].startswith(PARTS)
        samples.raw[key] = (wall_GS if planned else cpu_GS).tolist()
        cpu_us, slowest_us = float(np.mean([steady(s) for s in cpu_GS])), max(steady(s) for s in wall_GS)
        if key[0] == "experts":
            samples.experts[key[1:]] = (cpu_us, slowest_us)
        elif key[0].startswith("attention"):
            samples.attention.setdefault(key[0], {})[key[1]] = cpu_us
        elif key[0].startswith("blocks.attention"):
            samples.blocks.setdefault(key[0], {})[key[1]] = cpu_us
        elif planned:  # all ranks plan the same step: the slowest counts
            planning[key] = (float(key[1]), slowest_us)
        else:  # a name, the tokens, and in permute a part of the whole
            what, tokens = key[:2]
            rows = handled.get((what, tokens), float(tokens))
            before_us = samples.local.get((what, tokens), (0.0, 0.0))[1]
            samples.local[what, tokens] = (rows, before_us + cpu_us)
    samples.local |= planning_terms(planning, layers)
    rates = [taken.parts[0]["machine"] for taken in pools]
    samples.machine = {name: float(np.mean([rate[name] for rate in rates])) for name in rates[0]}
    return samples


def work_between_collectives_us(samples: Samples, effort: Effort) -> float:
    """CPU microseconds that a rank computes between two exchanges: gate, index work and experts of a layer of middling
    size, over the two exchanges of a dispatcher."""
    tokens = effort.local_tokens[len(effort.local_tokens) // 2]
    experts_us = float(np.median([cpu for cpu, _ in samples.experts.values()]))
    return (samples.local["gate", tokens][1] + samples.local["permute.a2a_dedup", tokens][1] + experts_us) / 2


def _collective_cases(effort: Effort, ranks: int) -> list[tuple[int, list[Case]]]:
    """(members, cases): everything over all ranks, the raw all-to-all and all-reduce over two."""
    full = [Case(op, rows) for op in HOME_OPS for rows in effort.home_rows]
    full += [Case(op, rows) for op in EXCHANGES for rows in effort.sent_rows]
    full += [Case(op, rows) for op in SLOT_OPS for rows in effort.places]
    full += skewed_cases(effort.sent_rows, effort.home_rows, ranks)
    full += [Case("barrier", 0)]
    if ranks <= 2:
        return [(ranks, full)] if ranks > 1 else []
    return [(ranks, full), (2, [Case(op, rows) for op in ("alltoall", "all_reduce") for rows in effort.home_rows])]


def local_work_task(context: RankContext, run: Run, effort: Effort, predictors: dict[str, Any]) -> dict[str, Any]:
    """Task of every rank: experts, index work, planning, attention and LM head in one rotation, and the machine's rates."""
    placement, source = run.fitted.placement, RandomWeights(run.model, 1.0, int(run.cfg["seed"]))
    transport = open_transport(context, "collective")
    most = max(effort.local_tokens)
    layers = {}
    for flow, dispatcher in INDEX_WORK:
        spec = _spec(run, flow, dispatcher)
        (layer,) = build_layers(transport, spec, placement, source, Gating.of(run.model), max_tokens=most, layers=[0])
        layers[dispatcher or flow] = layer
    several = build_layers(
        transport, _spec(run, "dp", "a2a_dedup"), placement, source, Gating.of(run.model), max_tokens=most
    )
    operations = expert_operations(several, expert_grid_points(placement.slots_per_rank, effort.rows_per_expert))
    operations |= gate_operations(several[0], effort.local_tokens)
    index_work, handled = permute_operations(layers, effort.local_tokens)
    operations |= index_work
    if is_tiny(run.model):
        operations |= attention_operations(context, run.model) | end_operations(context, effort.entries)
    operations |= block_operations(context, run, effort.local_tokens, effort.entries)
    burnt = burnt_memory()
    operations = {key: in_a_layer(operation, burnt) for key, operation in operations.items()}
    shuffled = _spec(run, "tp_shuffled", "a2a_dedup")
    operations |= plan_operations(context, run, shuffled, predictors, effort.planned_tokens)
    return {
        "times": rotate(context, operations, effort.local_samples),
        "handled": handled,
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
