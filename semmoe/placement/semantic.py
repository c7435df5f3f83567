"""Semantic placement: experts where the tokens that ask for them will sit.

Maximise, per layer, J = share of training assignments served at home - load_weight * sum_g max(0, load_g / mean -
load_target), where homes are the ones that scheduling would choose (at most home_cap times the mean a rank) and every
rank holds equally many experts. Homes and experts are improved in turn, each exactly given the other, from several
starts: the first quarter random, the others perturbations of the best so far. See token_homes.py (attention-TP, a home
per token and layer), request_homes.py (attention-DP, one home a request), exchange.py and replicas.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..assign import capped_owners
from ..errors import UserError
from ..predict.base import FIXED_POINT
from ..profile import Profile, count_by_row
from ..schedule.base import capacity_of
from .base import Placement, PlacementProblem
from .cocluster import covariance_EE
from .partition import improve
from .replicas import add_replicas
from .request_homes import alternate_requests, local_counts_EG, one_hot, request_homes
from .token_homes import alternate, local_counts, sample_of


class Semantic:
    """restarts: starts of the alternation; iterations: turns of one start; kick: share of experts that a perturbed
    start shuffles. load_weight, load_target, home_cap as in the module's formula; load_folds: groups of training
    requests on which the overload of a token-level placement is taken (exchange.py; homes of requests need one group,
    for requests of a kind are meant to load their rank). sample_tokens: training tokens that the alternation of a
    token-level placement works on; kappa: smoothing of their table where the predictor has no left-out predictions of
    its own (token_homes.py).

    `slots` beyond one per expert become replicas, chosen for locality (replicas.py). Stops adding starts at the
    problem's time limit (notes["starts"] says how many were done); otherwise the result depends on the seed alone.
    """

    def __init__(
        self,
        restarts: int = 16,
        load_weight: float = 1.0,
        load_target: float = 1.05,
        home_cap: float = 1.10,
        iterations: int = 12,
        sample_tokens: int = 8192,
        kappa: float = 2.0,
        kick: float = 0.15,
        load_folds: int = 2,
    ) -> None:
        for name, number, least in (
            ("restarts", restarts, 1),
            ("load_weight", load_weight, 0),
            ("load_target", load_target, 1),
            ("home_cap", home_cap, 1),
            ("iterations", iterations, 1),
            ("sample_tokens", sample_tokens, 1),
            ("kick", kick, 0),
            ("load_folds", load_folds, 1),
        ):
            if not number >= least:
                raise UserError(f"placement.{name}={number} must be at least {least}")
        if not kappa > 0 or kick > 1:
            raise UserError(f"placement.kappa={kappa} must be positive and placement.kick={kick} at most 1")
        self.restarts, self.iterations, self.kick = restarts, iterations, kick
        self.load_weight, self.load_target, self.load_folds = load_weight, load_target, load_folds
        self.home_cap, self.sample_tokens, self.kappa = home_cap, sample_tokens, kappa

    def place(self, problem: PlacementProblem) -> Placement:
        if problem.home == "request":
            return self._place_requests(problem)
        return self._place_tokens(problem)

    def _place_tokens(self, problem: PlacementProblem) -> Placement:
        profile, ranks, rng = problem.profile, problem.ep_size, problem.rng()
        sample = sample_of(problem, self.sample_tokens, self.kappa, rng)
        capacity = capacity_of(len(sample.rows_S), ranks, self.home_cap)
        layers = profile.num_layers
        load_FLE = fold_loads(profile, self.load_folds, rng)
        deadline = time.monotonic() + problem.time_limit_s
        holds, planned, starts = [], [], []
        for layer in range(layers):
            share_SE = sample.share_SE(layer)
            experts_Sk = profile.trace.experts_TLk[sample.rows_S, layer]
            load_FE = padded(load_FLE[:, layer], ranks)
            until = time.monotonic() + (deadline - time.monotonic()) / (layers - layer)
            similarity_EE = covariance_EE(share_SE, load_FE.shape[1])
            best, best_rank, done = -np.inf, np.zeros(load_FE.shape[1], dtype=np.int64), 0
            for start in range(self.restarts):
                first = self._start(start, best_rank, ranks, rng)
                if start < self.restarts // 4 or start == 0:
                    improve(similarity_EE, first, ranks, 0)
                found, rank_E = alternate(
                    share_SE,
                    experts_Sk,
                    load_FE,
                    first,
                    ranks,
                    capacity,
                    float(self.load_weight),
                    float(self.load_target),
                    self.iterations,
                )
                done += 1
                if found > best:
                    best, best_rank = found, rank_E
                if time.monotonic() > until:
                    break
            hold_EG = one_hot(best_rank, ranks)[: profile.num_experts]
            if problem.slots > profile.num_experts:
                hold_EG = self._replicate_tokens(problem, hold_EG, share_SE, experts_Sk, capacity)
            holds.append(hold_EG)
            planned.append(best)
            starts.append(done)
        notes: dict[str, Any] = {"planned_value": float(np.mean(planned)), "starts": int(min(starts))}
        return placement_of(np.stack(holds), problem, notes)

    def _start(
        self, start: int, best_rank_E: NDArray[np.int64], ranks: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        experts = len(best_rank_E)
        if start == 0 or start < self.restarts // 4 or self.kick == 0:
            return rng.permutation(np.arange(experts) % ranks)
        moved = rng.choice(experts, size=max(2, round(self.kick * experts)), replace=False)
        kicked = best_rank_E.copy()
        kicked[moved] = best_rank_E[rng.permutation(moved)]
        return kicked

    def _replicate_tokens(
        self,
        problem: PlacementProblem,
        base_EG: NDArray[np.bool_],
        share_SE: NDArray[np.float32],
        experts_Sk: NDArray[np.integer],
        capacity: int,
    ) -> NDArray[np.bool_]:
        """Replicas for the homes that the placement attracts, and homes for the replicas, twice."""
        ranks, k = problem.ep_size, experts_Sk.shape[1]
        hold_EG = base_EG
        for _ in range(2):
            score = np.rint(share_SE @ hold_EG.astype(np.float32) * (k * FIXED_POINT)).astype(np.int32)
            home_S = capped_owners(score, np.full(ranks, capacity, dtype=np.int64))
            local_EG = local_counts(experts_Sk, home_S, len(base_EG), ranks)
            hold_EG = self._filled(problem, base_EG, local_EG)
        return hold_EG

    def _place_requests(self, problem: PlacementProblem) -> Placement:
        profile, ranks, rng = problem.profile, problem.ep_size, problem.rng()
        layers, requests, experts = profile.num_layers, profile.trace.num_requests, profile.num_experts
        counts_LRE = np.stack([profile.request_counts_RE(layer) for layer in range(layers)])
        wide_LRE = padded(counts_LRE, ranks)
        load_LFE = padded(profile.load_LE.astype(np.float64), ranks)[:, None]
        capacity = capacity_of(requests, ranks, self.home_cap)
        deadline = time.monotonic() + problem.time_limit_s
        best, best_rank, done = -np.inf, np.zeros((layers, wide_LRE.shape[2]), dtype=np.int64), 0
        for start in range(self.restarts):
            if start == 0 or start < self.restarts // 4:
                home_R = rng.permutation(np.arange(requests) % ranks)
            else:
                home_R = request_homes(wide_LRE, one_hot(best_rank, ranks), capacity)
                moved = rng.choice(requests, size=max(min(2, requests), round(self.kick * requests)), replace=False)
                home_R[moved] = home_R[rng.permutation(moved)]
            found, rank_LE = alternate_requests(
                wide_LRE, load_LFE, home_R, ranks, capacity, self.load_weight, self.load_target, self.iterations
            )
            done += 1
            if found > best:
                best, best_rank = found, rank_LE
            if time.monotonic() > deadline:
                break
        holds_LEG = one_hot(best_rank, ranks)[:, :experts]
        if problem.slots > experts:
            base_LEG = holds_LEG
            for _ in range(2):
                home_R = request_homes(counts_LRE, holds_LEG, capacity)
                holds_LEG = np.stack(
                    [
                        self._filled(problem, base_LEG[layer], local_counts_EG(counts_LRE[layer], home_R, ranks))
                        for layer in range(layers)
                    ]
                )
        return placement_of(holds_LEG, problem, {"planned_value": float(best), "starts": done})

    def _filled(
        self, problem: PlacementProblem, base_EG: NDArray[np.bool_], local_EG: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        hold_EG = base_EG.copy()
        free_G = problem.slots // problem.ep_size - hold_EG.sum(axis=0)
        add_replicas(local_EG, hold_EG, free_G, float(self.load_weight), float(self.load_target))
        return hold_EG


def padded(counts_E: NDArray[Any], ranks: int) -> NDArray[Any]:
    """[..., E] with phantom experts (count 0) up to a multiple of G: trading with a phantom is a move to an empty slot."""
    short = -counts_E.shape[-1] % ranks
    return np.concatenate([counts_E, np.zeros((*counts_E.shape[:-1], short), dtype=counts_E.dtype)], axis=-1)


def fold_loads(profile: Profile, folds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """load_FLE: assignments per expert of `folds` random disjoint groups of training requests (see exchange.py)."""
    requests = profile.trace.num_requests
    folds = min(folds, requests)
    fold_R = rng.permutation(np.arange(requests) % folds)
    fold_T = fold_R[profile.trace.request_T]
    layers = range(profile.num_layers)
    counts = [count_by_row(fold_T, profile.trace.experts_TLk[:, i], folds, profile.num_experts) for i in layers]
    return np.stack(counts, axis=1).astype(np.float64)


def placement_of(holds_LEG: NDArray[np.bool_], problem: PlacementProblem, notes: dict[str, Any]) -> Placement:
    """Slots from who holds what: a rank's experts in ascending order, empty slots last."""
    per_rank = problem.slots // problem.ep_size
    table = np.full((len(holds_LEG), problem.ep_size, per_rank), -1, dtype=np.int32)
    for layer, hold_EG in enumerate(holds_LEG):
        for rank in range(problem.ep_size):
            held = np.flatnonzero(hold_EG[:, rank])
            table[layer, rank, : len(held)] = held
    return Placement(
        table.reshape(len(table), -1), problem.ep_size, problem.layer_ids, problem.model.num_experts, notes
    )
