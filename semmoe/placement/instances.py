"""Small placement problems cut from real routes, on which an optimum can be proved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..profile import Profile
from ..specs import ClusterSpec, ModelSpec
from ..trace import RoutingTrace
from .base import PlacementProblem

LAYERS, REQUESTS, CHOICES = 3, 8, 2
SHAPES = ((8, 4), (9, 3))  # (experts, ranks) of small_cases


def problem_of(
    trace: RoutingTrace, ranks: int, home: str, seed: int = 0, time_limit_s: float = 60.0, nodes: int = 1
) -> PlacementProblem:
    """A problem on one node, or on several whose NICs have an eighth of a link's bandwidth."""
    model = ModelSpec(
        name=trace.model,
        hidden=64,
        num_layers=int(trace.layer_ids_L[-1]) + 1,
        layer_ids=tuple(int(i) for i in trace.layer_ids_L),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        expert_ffn=64,
        vocab_size=trace.vocab_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
    )
    cluster = ClusterSpec(
        name="instance",
        nodes=nodes,
        ranks_per_node=ranks // nodes,
        topology="switch",
        memory_gib=80,
        memory_gbps=3000,
        bf16_tflops=900,
        link_gbps=400,
        alpha_us=10,
        nic_gbps=50 if nodes > 1 else 0.0,
    )
    slots = -(-trace.num_experts // ranks) * ranks
    return PlacementProblem(
        Profile.fit(trace), model, cluster, ranks, slots, home, seed=seed, time_limit_s=time_limit_s
    )


def cut(
    trace: RoutingTrace, layers: NDArray[np.integer], experts: NDArray[np.integer], item_T: NDArray[np.integer]
) -> RoutingTrace:
    """A trace of the assignments of some items to some experts in some layers, one request an item.

    item_T: item of every token (-1: not used). Every assignment becomes a token of top-1 routing of its own, so an item
    keeps its counts although its tokens also used experts that are left out. Layers that saw fewer assignments of an
    item than others are filled by repeating its own, in order.
    """
    new_E = np.full(trace.num_experts, -1, dtype=np.int64)
    new_E[experts] = np.arange(len(experts))
    rows, lengths = [], []
    for item in range(int(item_T.max()) + 1):
        routes_TLk = new_E[trace.experts_TLk[item_T == item][:, layers]]
        lists = [routes_TLk[:, i][routes_TLk[:, i] >= 0] for i in range(len(layers))]
        length = max(len(one) for one in lists)
        if min(len(one) for one in lists) == 0:
            continue
        rows.append(np.stack([np.resize(one, length) for one in lists], axis=1))
        lengths.append(length)
    if not rows:
        raise UserError(f"{trace.path}: no item used experts {list(experts)} in every layer of {list(layers)}")
    return RoutingTrace(
        model=trace.model,
        num_experts=len(experts),
        vocab_size=len(rows),
        experts_TLk=np.concatenate(rows)[:, :, None].astype(np.int16),
        token_id_T=np.repeat(np.arange(len(rows)), lengths),
        request_offset_R1=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_len_R=np.zeros(len(rows), dtype=np.int32),
        domain_R=np.full(len(rows), "cut"),
        layer_ids_L=np.arange(len(layers)),
        path=trace.path,
    )


def request_instance(
    trace: RoutingTrace, experts: int, requests: int, layers: int, rng: np.random.Generator
) -> RoutingTrace:
    """Random requests, adjacent layers and experts (drawn by load, so that few are idle)."""
    first = int(rng.integers(trace.num_layers - layers + 1))
    chosen_L = np.arange(first, first + layers)
    chosen_E = loaded_experts(trace, chosen_L, experts, rng)
    item_R = np.full(trace.num_requests, -1)
    item_R[rng.choice(trace.num_requests, size=min(requests, trace.num_requests), replace=False)] = np.arange(
        min(requests, trace.num_requests)
    )
    return cut(trace, chosen_L, chosen_E, item_R[trace.request_T])


def token_instance(trace: RoutingTrace, experts: int, types: int, rng: np.random.Generator) -> RoutingTrace:
    """Random frequent token types in one layer, the same number of occurrences of each, one item a type."""
    layer = np.array([int(rng.integers(trace.num_layers))])
    chosen_E = loaded_experts(trace, layer, experts, rng)
    count_V = np.bincount(trace.token_id_T, minlength=trace.vocab_size)
    frequent = np.argsort(-count_V, kind="stable")[: 8 * types]
    chosen = rng.choice(frequent, size=types, replace=False)
    same = int(count_V[chosen].min())
    item_T = np.full(trace.num_tokens, -1)
    for item, token in enumerate(chosen):
        item_T[rng.choice(np.flatnonzero(trace.token_id_T == token), size=same, replace=False)] = item
    return cut(trace, layer, chosen_E, item_T)


def small_cases(trace: RoutingTrace, count: int) -> Iterator[PlacementProblem]:
    """`count` cases of every shape, small enough to enumerate every placement."""
    for experts, ranks in SHAPES:
        for seed in range(count):
            yield problem_of(small_trace(trace, experts, np.random.default_rng(seed)), ranks, "request", seed)


def small_trace(trace: RoutingTrace, experts: int, rng: np.random.Generator) -> RoutingTrace:
    """Experts that tokens chose in each of 3 adjacent layers, 8 requests, the tokens that chose two or more of those
    experts in every layer (two of their choices are kept). A request without such tokens is passed over."""
    first = int(rng.integers(trace.num_layers - LAYERS + 1))
    chosen_LE = [loaded_experts(trace, np.array([first + i]), experts, rng) for i in range(LAYERS)]
    routes, fits_T = [], np.ones(trace.num_tokens, dtype=bool)
    for layer, chosen_E in enumerate(chosen_LE):
        new_E = np.full(trace.num_experts, experts)
        new_E[chosen_E] = np.arange(experts)
        kept_TC = np.sort(new_E[trace.experts_TLk[:, first + layer]], axis=1)[:, :CHOICES]  # others sort to the end
        fits_T &= kept_TC[:, -1] < experts
        routes.append(kept_TC)
    rows_R = [np.flatnonzero(fits_T & (trace.request_T == r)) for r in rng.permutation(trace.num_requests)]
    rows_R = [rows for rows in rows_R if len(rows)][:REQUESTS]
    rows_T, ends = np.concatenate(rows_R), np.cumsum([len(rows) for rows in rows_R])
    return RoutingTrace(
        model=trace.model,
        num_experts=experts,
        vocab_size=trace.vocab_size,
        experts_TLk=np.stack(routes, axis=1)[rows_T].astype(np.int16),
        token_id_T=trace.token_id_T[rows_T],
        request_offset_R1=np.concatenate([[0], ends]),
        prompt_len_R=np.zeros(len(rows_R), dtype=np.int32),
        domain_R=np.full(len(rows_R), "cut"),
        layer_ids_L=np.arange(LAYERS),
        path=trace.path,
    )


def loaded_experts(
    trace: RoutingTrace, layers: NDArray[np.integer], experts: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    load_E = np.bincount(trace.experts_TLk[:, layers].ravel(), minlength=trace.num_experts) + 1.0
    return np.sort(rng.choice(trace.num_experts, size=experts, replace=False, p=load_E / load_E.sum()))
