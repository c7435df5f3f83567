"""Sem-MoE's Algorithm 1 (arXiv 2503.04398, appendix B): experts and requests placed greedily in turn.

Repeat n_steps times: experts in descending hotness go to the cluster with the largest
    alpha_e * affinity with its experts + beta_e * affinity with its requests - gamma_e * its load,
a cluster being full at E / G experts; ft_steps random pairs of two clusters trade places if the affinity grows; requests,
longest first, go to the cluster with the largest alpha_r * affinity with its requests + beta_r * affinity with its
experts, at most ceil(R / G) each. The best pair by theta * sum_c |tokens_c / S - 1/G| + (1 - theta) * remote share is kept.

The paper gives no values and no affinity formula. Filled in here: theta .5, all weights 1; expert-expert affinity is the
product of confidences summed over token occurrences (W^T W with W = confidence * count); a request's profile is the sum
of the confidence rows of its tokens. Each term is a share (of an expert's affinity, of its mass, of a mean load), so
that weights of 1 mean something. Without token homes (attention-DP) requests are shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ..assign import assign_capped
from ..errors import UserError
from ..profile import Profile
from .base import Placement, PlacementProblem
from .groups import most_a_rank, placed
from .sem_moe_polish import best_experts, objective, polished


class SemMoe:
    """The paper's Algorithm 1 with its gaps filled in, the best of several starts by its objective.

    polish: also exchange requests and re-assign experts exactly while the objective falls, and let every second start
    skip the greedy steps; without it this is Algorithm 1 alone, often far from the optimum of its own objective.

    notes: "objective" (mean over layers), and for the paper's predictor "token_rank_LU" (the rank in whose requests a
    token type occurs most, types as in Profile.token_ids_U) and "token_confidence_LU" (that rank's share).
    """

    def __init__(
        self,
        theta: float = 0.5,
        alpha_e: float = 1.0,
        beta_e: float = 1.0,
        gamma_e: float = 1.0,
        alpha_r: float = 1.0,
        beta_r: float = 1.0,
        n_steps: int = 8,
        ft_steps: int = 64,
        restarts: int = 32,
        polish: bool = True,
    ) -> None:
        if not 0 <= theta <= 1 or n_steps < 1 or ft_steps < 0 or restarts < 1:
            raise UserError(
                f"placement.theta={theta} must lie in 0..1, placement.n_steps={n_steps} and restarts={restarts} be at "
                f"least 1, placement.ft_steps={ft_steps} at least 0"
            )
        self.polish = polish
        self.theta, self.n_steps, self.ft_steps, self.restarts = theta, n_steps, ft_steps, restarts
        self.weights = np.array([alpha_e, beta_e, gamma_e, alpha_r, beta_r], dtype=np.float64)

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks = problem.profile, problem.ep_size
        tables = Affinities.of(profile, most_a_rank(profile.num_experts, ranks) * ranks)
        layers = profile.num_layers
        groups = [range(layers)] if problem.home == "request" else [range(i, i + 1) for i in range(layers)]
        ranks_LE, labels, shares, values = [], [], [], []
        for group in groups:
            part = slice(group.start, group.stop)
            value, rank_LE, home_R = self.solve(tables, part, ranks, problem.seed)
            label_U, share_U = token_labels(tables.occurrences_RU, home_R, ranks)
            ranks_LE.append(rank_LE)
            values += [value] * len(group)
            labels += [label_U] * len(group)
            shares += [share_U] * len(group)
        notes: dict[str, Any] = {
            "objective": float(np.mean(values)),
            "token_rank_LU": np.stack(labels),
            "token_confidence_LU": np.stack(shares),
        }
        return placed(np.concatenate(ranks_LE), problem, notes)

    def solve(
        self, tables: Affinities, part: slice, ranks: int, seed: int
    ) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """(objective, rank_LE, home_R) of some layers with shared requests."""
        best = np.inf
        for start in range(self.restarts):
            rng = np.random.default_rng([seed, start])
            home_R = similar_requests(tables.mass_LRE[part], ranks, rng)
            if start % 2:
                home_R = rng.permutation(np.arange(len(home_R)) % ranks)
            found = algorithm_one(
                tables.mass_LRE[part],
                tables.pairs_LEE[part],
                tables.length_R,
                home_R,
                ranks,
                self.theta,
                self.weights,
                self.n_steps,
                self.ft_steps,
                seed + start,
            )
            if self.polish:
                if start % 2:  # from the random homes: the greedy steps lead most starts to one pair
                    found = (found[0], best_experts(tables.mass_LRE[part], home_R, ranks), home_R)
                found = polished(tables.mass_LRE[part], tables.length_R, found[1], found[2], ranks, self.theta)
            if found[0] < best:
                best, rank_LE, home_R_best = found
        return float(best), rank_LE, home_R_best


@dataclass(frozen=True, eq=False)
class Affinities:
    """What Algorithm 1 looks at; E includes phantom experts that only fill up the clusters.

    mass_LRE: confidence rows summed over the tokens of each request; pairs_LEE: share of an expert's affinity that lies
    with each other; length_R: tokens of a request; occurrences_RU: how often each token type occurs in each request.
    """

    mass_LRE: NDArray[np.float64]
    pairs_LEE: NDArray[np.float64]
    length_R: NDArray[np.float64]
    occurrences_RU: Any

    @classmethod
    def of(cls, profile: Profile, experts: int) -> Affinities:
        trace, types = profile.trace, len(profile.token_ids_U)
        ones = np.ones(trace.num_tokens)
        occurrences = csr_array((ones, (trace.request_T, profile.type_T)), shape=(trace.num_requests, types))
        mass, pairs = [], []
        short = experts - profile.num_experts
        for layer in range(profile.num_layers):
            counts_UE = np.pad(profile.token_counts_UE(layer).astype(np.float64), ((0, 0), (0, short)))
            confidence_UE = counts_UE / np.maximum(counts_UE.sum(axis=1, keepdims=True), 1.0)
            weighted_UE = confidence_UE * profile.token_count_U[:, None]
            affinity_EE = weighted_UE.T @ weighted_UE
            np.fill_diagonal(affinity_EE, 0.0)
            pairs.append(affinity_EE / np.maximum(affinity_EE.sum(axis=1, keepdims=True), 1e-12))
            mass.append(occurrences @ confidence_UE)
        return cls(np.stack(mass), np.stack(pairs), trace.length_R.astype(np.float64), occurrences)


def similar_requests(mass_LRE: NDArray[np.float64], ranks: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """home_R: requests of similar expert profiles together, at most ceil(R / G) each (balanced k-means, cosine)."""
    requests = mass_LRE.shape[1]
    wide = mass_LRE.transpose(1, 0, 2).reshape(requests, -1)
    wide = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    centre_G = wide[rng.choice(requests, size=ranks, replace=requests < ranks)]
    home_R = np.zeros(requests, dtype=np.int64)
    for _ in range(10):
        scores = np.rint(wide @ centre_G.T * (1 << 20)).astype(np.int64)
        fresh = assign_capped(scores, -(-requests // ranks))
        if np.array_equal(fresh, home_R):
            break
        home_R = fresh
        member_GR = (home_R[None] == np.arange(ranks)[:, None]).astype(np.float64)
        centre_G = member_GR @ wide / np.maximum(member_GR.sum(axis=1, keepdims=True), 1.0)
    return home_R


def token_labels(
    occurrences_RU: Any, home_R: NDArray[np.integer], ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(label_U, share_U): the rank in whose requests a token type occurs most (ties to the lower), and its share."""
    home_GR = (home_R[None] == np.arange(ranks)[:, None]).astype(np.float64)
    count_GU = (occurrences_RU.T @ home_GR.T).T
    label_U = count_GU.argmax(axis=0)
    return label_U, count_GU.max(axis=0) / np.maximum(count_GU.sum(axis=0), 1.0)


@numba.njit(cache=True)
def algorithm_one(mass_LRE, pairs_LEE, length_R, home_R, ranks, theta, weights, n_steps, ft_steps, seed):  # type: ignore[no-untyped-def]
    """(objective, rank_LE, home_R): the best pair of expert and request clusters over n_steps."""
    np.random.seed(seed)
    layers, experts = mass_LRE.shape[0], mass_LRE.shape[2]
    rank_LE = np.zeros((layers, experts), dtype=np.int64)
    best = np.inf
    best_LE, best_R = rank_LE.copy(), home_R.copy()
    for _ in range(n_steps):
        for layer in range(layers):
            place_experts(mass_LRE[layer], pairs_LEE[layer], home_R, ranks, weights, ft_steps, rank_LE[layer])
        home_R = schedule_requests(mass_LRE, length_R, rank_LE, ranks, weights)
        now = objective(mass_LRE, length_R, rank_LE, home_R, ranks, theta)
        if now < best:
            best = now
            best_LE[:] = rank_LE
            best_R[:] = home_R
    return best, best_LE, best_R


@numba.njit(cache=True)
def place_experts(mass_RE, pairs_EE, home_R, ranks, weights, ft_steps, rank_E):  # type: ignore[no-untyped-def]
    """rank_E (filled): greedy by hotness, then random trades that raise the affinity."""
    requests, experts = mass_RE.shape
    load_E = mass_RE.sum(axis=0)
    mean = max(load_E.sum() / ranks, 1e-12)
    from_EG = np.zeros((experts, ranks))  # share of e's mass that comes from the requests of g
    for r in range(requests):
        for e in range(experts):
            from_EG[e, home_R[r]] += mass_RE[r, e] / max(load_E[e], 1e-12)
    load_G, room_G = np.zeros(ranks), np.full(ranks, experts // ranks)
    rank_E[:] = -1
    for e in np.argsort(-load_E, kind="mergesort"):
        at, most = -1, -np.inf
        for g in range(ranks):
            if room_G[g] == 0:
                continue
            near = 0.0
            for f in range(experts):
                if rank_E[f] == g:
                    near += pairs_EE[e, f]
            score = weights[0] * near + weights[1] * from_EG[e, g] - weights[2] * load_G[g] / mean
            if score > most:
                at, most = g, score
        rank_E[e] = at
        room_G[at] -= 1
        load_G[at] += load_E[e]
    for _ in range(ft_steps):
        a, b = np.random.randint(experts), np.random.randint(experts)
        g, h = rank_E[a], rank_E[b]
        if g == h:
            continue
        gain = weights[1] * (from_EG[a, h] - from_EG[a, g] + from_EG[b, g] - from_EG[b, h])
        for f in range(experts):
            if f != a and f != b:
                if rank_E[f] == g:
                    gain += weights[0] * (pairs_EE[b, f] - pairs_EE[a, f])
                elif rank_E[f] == h:
                    gain += weights[0] * (pairs_EE[a, f] - pairs_EE[b, f])
        if gain > 0:
            rank_E[a], rank_E[b] = h, g


@numba.njit(cache=True)
def schedule_requests(mass_LRE, length_R, rank_LE, ranks, weights):  # type: ignore[no-untyped-def]
    """home_R: longest first, to the cluster of the nearest requests and experts, at most ceil(R / G) each."""
    layers, requests, experts = mass_LRE.shape
    home_R = np.full(requests, -1, dtype=np.int64)
    room_G = np.full(ranks, -(-requests // ranks))
    sum_GLE = np.zeros((ranks, layers, experts))  # normalised profiles of the requests already there
    count_G = np.zeros(ranks)
    for r in np.argsort(-length_R, kind="mergesort"):
        total, square = 0.0, 0.0
        near_G, here_G = np.zeros(ranks), np.zeros(ranks)
        for layer in range(layers):
            for e in range(experts):
                mass = mass_LRE[layer, r, e]
                total += mass
                square += mass * mass
                here_G[rank_LE[layer, e]] += mass
                for g in range(ranks):
                    near_G[g] += mass * sum_GLE[g, layer, e]
        norm = max(np.sqrt(square), 1e-12)
        at, most = -1, -np.inf
        for g in range(ranks):
            if room_G[g] == 0:
                continue
            score = weights[3] * near_G[g] / norm / max(count_G[g], 1.0) + weights[4] * here_G[g] / max(total, 1e-12)
            if score > most:
                at, most = g, score
        home_R[r] = at
        room_G[at] -= 1
        count_G[at] += 1
        sum_GLE[at] += mass_LRE[:, r] / norm
    return home_R
