"""What each baseline placement tries to minimise, and the optimum of that on small cases, by enumeration.

A comparison is fair when every policy is near the best that its own idea allows. Optima hold for placements without
replicas; sums and means over layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from .base import Placement, PlacementProblem
from .enumeration import placements
from .exflow import group_flow, one_hot
from .layer_tail import tail_cost
from .moetuner import relative_slowness
from .partition import kept
from .program import programs_of, ranks_of
from .random import Random
from .sem_moe import Affinities
from .sem_moe_sampler import scores

Value = Callable[[Placement, PlacementProblem], float]
THETA = 0.5  # of the paper's program, the default of sem_moe and sem_moe_sampler


@dataclass(frozen=True)
class Objective:
    """value(placement, problem): what the policy minimises. optimum(placement, problem): the least value possible (of
    what the policy leaves open once its first stage is as in the placement)."""

    name: str
    value: Value
    optimum: Value


def peak_load(placement: Placement, problem: PlacementProblem) -> float:
    """max / mean rows a rank, rows spread evenly over the copies of an expert; mean over layers."""
    share_LEG = placement.rank_mask_LEG / placement.rank_mask_LEG.sum(axis=2, keepdims=True)
    load_LG = np.einsum("le,leg->lg", problem.profile.load_LE, share_LEG)
    return float((load_LG.max(axis=1) / load_LG.mean(axis=1)).mean())


def least_peak(placement: Placement, problem: PlacementProblem) -> float:
    load_LWG = _loads_of_all(problem)
    return float((load_LWG.max(axis=2) / load_LWG.mean(axis=2)).min(axis=1).mean())


def unevenness(placement: Placement, problem: PlacementProblem) -> float:
    """Sum of |load - mean|, as a share of all assignments."""
    load_LE = problem.profile.load_LE
    load_LG = np.einsum("le,leg->lg", load_LE, placement.rank_mask_LEG)
    return float(np.abs(load_LG - load_LG.mean(axis=1, keepdims=True)).sum() / load_LE.sum())


def least_unevenness(placement: Placement, problem: PlacementProblem) -> float:
    load_LWG = _loads_of_all(problem)
    uneven_LW = np.abs(load_LWG - load_LWG.mean(axis=2, keepdims=True)).sum(axis=2)
    return float(uneven_LW.min(axis=1).sum() / problem.profile.load_LE.sum())


def tail(placement: Placement, problem: PlacementProblem) -> float:
    """Over boundaries of layers, the largest flow between two different ranks over its bandwidth, summed."""
    slow_GG, order = relative_slowness(problem), np.arange(placement.ep_size)
    return sum(tail_cost(flow_GG, order, order, slow_GG) for flow_GG in _flows(placement, problem))


def least_tail(placement: Placement, problem: PlacementProblem) -> float:
    """Of these clusters, on any ranks: the layers are a chain, so the best way to reach each order suffices."""
    slow_GG = relative_slowness(problem)
    orders = [np.array(order) for order in itertools.permutations(range(placement.ep_size))]
    reach_W = np.zeros(len(orders))
    for flow_GG in _flows(placement, problem):
        step_WW = np.array([[tail_cost(flow_GG, a, b, slow_GG) for b in orders] for a in orders])
        reach_W = (reach_W[:, None] + step_WW).min(axis=0)
    return float(reach_W.min())


def rank_changes(placement: Placement, problem: PlacementProblem) -> float:
    """Tokens' choices that lie on another rank than those of the layer before."""
    return float(sum(flow_GG.sum() - np.trace(flow_GG) for flow_GG in _flows(placement, problem)))


def fewest_changes(placement: Placement, problem: PlacementProblem) -> float:
    """A chain again, over all placements of a layer."""
    ranks, profile = problem.ep_size, problem.profile
    ways_WE = placements(profile.num_experts, ranks, True)
    hot_WEG = (ways_WE[:, :, None] == np.arange(ranks)).astype(np.float32)
    stay_W = np.zeros(len(ways_WE))
    total = 0.0
    for layer in range(1, profile.num_layers):
        flow_EE = profile.transitions_EE(layer).astype(np.float32)
        total += float(flow_EE.sum(dtype=np.float64))
        pushed_WX = np.einsum("weg,ef->wfg", hot_WEG, flow_EE).reshape(len(ways_WE), -1)
        stay_W = (stay_W[:, None] + pushed_WX @ hot_WEG.reshape(len(ways_WE), -1).T).max(axis=0)
    return total - float(stay_W.max())


def cut_pairs(placement: Placement, problem: PlacementProblem) -> float:
    """Pairs of experts that one token chose and that lie on different ranks."""
    pairs = [_pairs_EE(problem, layer) for layer in range(problem.profile.num_layers)]
    rank_LE = ranks_of(placement)
    return sum(pair_EE.sum() / 2 - kept(pair_EE, rank_E) for pair_EE, rank_E in zip(pairs, rank_LE, strict=True))


def fewest_cut(placement: Placement, problem: PlacementProblem) -> float:
    ways_WE, least = placements(problem.profile.num_experts, problem.ep_size, False), 0.0
    for layer in range(problem.profile.num_layers):
        pair_EE = _pairs_EE(problem, layer)
        least += pair_EE.sum() / 2 - max(kept(pair_EE, way_E) for way_E in ways_WE)
    return least


def sampled_program(placement: Placement, problem: PlacementProblem) -> float:
    """theta * unevenness of homes + (1 - theta) * remote share of the assignments, under the best homes (enumerated)."""
    return _program(placement, *_counted(problem), problem.profile.trace.num_requests)


def least_sampled_program(placement: Placement, problem: PlacementProblem) -> float:
    return _least_program(*_counted(problem), problem.ep_size, problem.profile.trace.num_requests)


def greedy_program(placement: Placement, problem: PlacementProblem) -> float:
    """The same over confidences, at most ceil(R / G) requests a rank."""
    return _program(placement, *_confident(problem), -(-problem.profile.trace.num_requests // problem.ep_size))


def least_greedy_program(placement: Placement, problem: PlacementProblem) -> float:
    quota = -(-problem.profile.trace.num_requests // problem.ep_size)
    return _least_program(*_confident(problem), problem.ep_size, quota)


def remote(placement: Placement, problem: PlacementProblem) -> float:
    """Share of assignments away from home, the best homes within the cap: `semantic` without its load term."""
    (program,) = programs_of(problem)
    return 1.0 - program.homes(ranks_of(placement))[0] / program.total


def least_remote(placement: Placement, problem: PlacementProblem) -> float:
    (program,) = programs_of(problem)
    return _least_program(*_counted(problem), problem.ep_size, program.most_items, theta=0.0)


OBJECTIVES = {
    "eplb": Objective("peak load", peak_load, least_peak),
    "load_balanced": Objective("peak load", peak_load, least_peak),
    "moetuner": Objective("unevenness of load", unevenness, least_unevenness),
    "moetuner, tail": Objective("tail between layers of its clusters", tail, least_tail),
    "exflow": Objective("rank changes between layers", rank_changes, fewest_changes),
    "occult": Objective("co-activated pairs cut", cut_pairs, fewest_cut),
    "grace": Objective("co-activated pairs cut", cut_pairs, fewest_cut),
    "sem_moe": Objective("the paper's program, homes capped", greedy_program, least_greedy_program),
    "sem_moe_sampler": Objective("the paper's program", sampled_program, least_sampled_program),
    "semantic": Objective("assignments away from home", remote, least_remote),
}


def gaps(policy: Any, objective: Objective, cases: list[PlacementProblem]) -> NDArray[np.float64]:
    """[cases, 2]: (value of the policy, of `random`) / optimum - 1; equal to the optimum counts 0."""
    table = []
    for problem in cases:
        placement = policy.place(problem)
        least = objective.optimum(placement, problem)
        values = [objective.value(one, problem) for one in (placement, Random().place(problem))]
        table.append([(value - least) / least if value - least > 1e-9 else 0.0 for value in values])
    return np.array(table)


def _loads_of_all(problem: PlacementProblem) -> NDArray[np.float64]:
    """load_LWG of every placement W of a layer."""
    ways_WE = placements(problem.profile.num_experts, problem.ep_size, False)
    hot_WEG = (ways_WE[:, :, None] == np.arange(problem.ep_size)).astype(np.float64)
    return np.einsum("le,weg->lwg", problem.profile.load_LE.astype(np.float64), hot_WEG)


def _flows(placement: Placement, problem: PlacementProblem) -> list[NDArray[np.float64]]:
    """Transitions between the ranks of consecutive layers."""
    rank_LE, profile = ranks_of(placement), problem.profile
    return [
        group_flow(profile.transitions_EE(i), rank_LE[i - 1], rank_LE[i], placement.ep_size)
        for i in range(1, profile.num_layers)
    ]


def _pairs_EE(problem: PlacementProblem, layer: int) -> NDArray[np.float64]:
    pair_EE = problem.profile.coactivation_EE(layer).astype(np.float64)
    np.fill_diagonal(pair_EE, 0.0)
    return pair_EE


def _counted(problem: PlacementProblem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(mass_LRE, share_R): assignments and lengths of requests as shares."""
    mass_LRE = problem.profile.request_counts_LRE().astype(np.float64)
    length_R = problem.profile.trace.length_R
    return mass_LRE / mass_LRE.sum(), length_R / length_R.sum()


def _confident(problem: PlacementProblem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(mass_LRE, share_R): confidences of Algorithm 1 and lengths of requests as shares."""
    tables = Affinities.of(problem.profile, problem.profile.num_experts)
    return tables.mass_LRE / tables.mass_LRE.sum(), tables.length_R / tables.length_R.sum()


def _program(placement: Placement, mass_LRE: NDArray[np.float64], share_R: NDArray[np.float64], quota: int) -> float:
    """The least value of the paper's program over all homes of at most `quota` requests a rank."""
    home_NR = _homes(len(share_R), placement.ep_size, quota)
    score_RG = scores(mass_LRE, ranks_of(placement), placement.ep_size)
    local_N = np.take_along_axis(score_RG.T, home_NR, axis=0).sum(axis=1)
    load_NG = np.stack([(home_NR == g) @ share_R for g in range(placement.ep_size)], axis=1)
    uneven_N = np.abs(load_NG - 1.0 / placement.ep_size).sum(axis=1)
    return float((THETA * uneven_N + (1.0 - THETA) * (1.0 - local_N)).min())


def _homes(requests: int, ranks: int, quota: int) -> NDArray[np.int64]:
    """home_NR: every way to give requests homes of at most `quota` each."""
    home_NR = np.indices((ranks,) * requests).reshape(requests, -1).T
    most_N = np.max([(home_NR == g).sum(axis=1) for g in range(ranks)], axis=0)
    return np.ascontiguousarray(home_NR[most_N <= quota])


def _least_program(
    mass_LRE: NDArray[np.float64], share_R: NDArray[np.float64], ranks: int, quota: int, theta: float = THETA
) -> float:
    """Over all homes, whose best experts are an assignment a layer (exact)."""
    experts, least = mass_LRE.shape[2], np.inf
    rank_S = np.repeat(np.arange(ranks), experts // ranks)  # of every slot
    home_NR = _homes(len(share_R), ranks, quota)
    most_NR = np.maximum.accumulate(home_NR, axis=1)
    anew = (home_NR[:, 0] == 0) & (home_NR[:, 1:] <= most_NR[:, :-1] + 1).all(axis=1)
    for home_R in home_NR[anew]:  # ranks numbered by their first request: others are the same under other numbers
        hot_RG = one_hot(home_R, ranks)
        uneven = float(np.abs(share_R @ hot_RG - 1.0 / ranks).sum())
        if theta * uneven >= least:
            continue
        local = 0.0
        for mass_RE in mass_LRE:
            score_ES = (mass_RE.T @ hot_RG)[:, rank_S]
            local += float(score_ES[linear_sum_assignment(-score_ES)].sum())
        least = min(least, theta * uneven + (1.0 - theta) * (1.0 - local))
    return least
