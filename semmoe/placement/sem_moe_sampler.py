"""The paper's 0-1 program by cross-entropy sampling, the solver of its first versions ("Speculative MoE", arXiv 2503.04398).

    minimise  theta * sum_g |load_g - 1/G| + (1 - theta) * share of assignments that are remote
    over the rank of every expert (equally many a rank) and of every item (a token type, or a request in attention-DP).

Probabilities p[l, e, g] start even. Each round draws placements from them, lets every item go where the objective is
least, takes the best as elite and moves p towards the elite's frequencies. Ranks are interchangeable, so each draw is
relabelled to agree with the best one first; without it the elite would average to even again. At last the best draw of
every round is improved by exact experts for given homes and exchanges of items in turn.

The published versions differ in solver only; their details are not public. Filled in here: theta .5, items answer the
drawn experts (drawing both needs many more draws), relabelling, the last improvement, and in attention-TP only the
`types` most frequent token types, which is where the traffic is.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..errors import UserError
from .base import Placement, PlacementProblem
from .groups import most_a_rank, placed
from .search_clock import search_s
from .sem_moe_polish import best_experts

STARTS = 6  # orders in which few items answer a placement
MOST_TRADED = 256  # with more items than this, each is so small that moves alone level the load


class SemMoeSampler:
    """The paper's co-clustering program solved by cross-entropy sampling, as in its first versions.

    theta: weight of balance against locality; draws a round, the share `elite` of them kept, `rounds` at most; step: how
    far probabilities move towards the elite; types: token types that are looked at in attention-TP.
    notes["objective"]: mean over layers. The problem's time limit ends the rounds early (notes["rounds"]).
    """

    def __init__(
        self,
        theta: float = 0.5,
        draws: int = 48,
        elite: float = 0.125,
        step: float = 0.7,
        rounds: int = 20,
        types: int = 1024,
    ) -> None:
        if not 0 <= theta <= 1 or not 0 < elite <= 1 or not 0 < step <= 1:
            raise UserError(
                f"placement.theta={theta} must lie in 0..1, placement.elite={elite} and placement.step={step} above 0 "
                "and at most 1"
            )
        if min(draws, rounds, types) < 1:
            raise UserError(f"placement.draws={draws}, rounds={rounds} and types={types} must be at least 1")
        self.theta, self.draws, self.step, self.rounds, self.types = theta, draws, step, rounds, types
        self.elite = max(1, round(elite * draws))

    def place(self, problem: PlacementProblem) -> Placement:
        profile, ranks = problem.profile, problem.ep_size
        layers = range(profile.num_layers)
        short = most_a_rank(profile.num_experts, ranks) * ranks - profile.num_experts
        if problem.home == "request":
            counts = [np.stack([profile.request_counts_RE(layer) for layer in layers])]
            weight_U = profile.trace.length_R
        else:
            frequent_U = np.sort(np.argsort(-profile.token_count_U, kind="stable")[: self.types])
            counts = [profile.token_counts_UE(layer)[frequent_U][None] for layer in layers]
            weight_U = profile.token_count_U[frequent_U]
        share_U = weight_U / max(weight_U.sum(), 1)
        ranks_LE, values, rounds = [], [], []
        for part in counts:
            mass_LUE = np.pad(part, ((0, 0), (0, 0), (0, short))).astype(np.float64)
            found = self.solve(mass_LUE, share_U, ranks, problem.seed, problem.time_limit_s / len(counts))
            values.append(found[0])
            ranks_LE.append(found[1])
            rounds.append(found[3])
        notes = {"objective": float(np.mean(values)), "rounds": min(rounds)}
        return placed(np.concatenate(ranks_LE), problem, notes)

    def solve(
        self, mass_LUE: NDArray[np.float64], share_U: NDArray[np.float64], ranks: int, seed: int, time_limit_s: float
    ) -> tuple[float, NDArray[np.int64], NDArray[np.int64], int]:
        """(objective, rank_LE, home_U, rounds made) of layers whose items share their homes.

        mass_LUE: assignments of item u to expert e, E a multiple of G; share_U: an item's part of all tokens.
        """
        until = search_s() + time_limit_s
        layers, _, experts = mass_LUE.shape
        mass_LUE = mass_LUE / max(mass_LUE.sum(), 1e-12)
        chance_LEG = np.full((layers, experts, ranks), 1.0 / ranks)
        leaders: list[tuple[float, NDArray[np.int64], NDArray[np.int64]]] = []
        for turn in range(self.rounds):
            rank_NLE = drawn(chance_LEG, self.draws, seed * self.rounds + turn)
            value_N, home_NU = answered(mass_LUE, share_U, rank_NLE, ranks, self.theta)
            elite = np.argsort(value_N, kind="stable")[: self.elite]
            made = turn + 1
            worth = elite if len(share_U) <= MOST_TRADED else elite[:1]  # of few items, every elite is improved below
            leaders += [(float(value_N[n]), rank_NLE[n], home_NU[n]) for n in worth[::-1]]  # the best last
            leader_LE = min(leaders, key=lambda one: one[0])[1]
            alike_NLE = np.stack([relabelled(rank_NLE[n], leader_LE, ranks) for n in elite])
            share_LEG = (alike_NLE[..., None] == np.arange(ranks)).mean(axis=0)
            chance_LEG += self.step * (share_LEG - chance_LEG)
            if search_s() > until or chance_LEG.max(axis=2).min() > 0.99:
                break
        best = leaders.pop()
        for one in [best, *leaders]:
            found = self.improved(mass_LUE, share_U, *one, ranks)
            best = found if found[0] < best[0] else best
            if search_s() > until:
                break
        value, rank_LE, home_U = best
        return value, rank_LE, home_U, made

    def improved(
        self,
        mass_LUE: NDArray[np.float64],
        share_U: NDArray[np.float64],
        value: float,
        rank_LE: NDArray[np.int64],
        home_U: NDArray[np.int64],
        ranks: int,
    ) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """The pair after exact experts and exchanges of items in turn, until the objective stops falling."""
        while True:
            fresh_LE = best_experts(mass_LUE * (1 << 20), home_U, ranks)
            fresh_U = home_U.copy()
            score_UG = scores(mass_LUE, fresh_LE, ranks)
            trade(score_UG, share_U, fresh_U, self.theta)
            now = value_of(score_UG, share_U, fresh_U, self.theta)
            if now >= value - 1e-9:
                return value, rank_LE, home_U
            value, rank_LE, home_U = float(now), fresh_LE, fresh_U


def relabelled(rank_LE: NDArray[np.int64], leader_LE: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """The same groups under the labels that agree most with the leader's (one relabelling for all layers)."""
    both = np.bincount(rank_LE.ravel() * ranks + leader_LE.ravel(), minlength=ranks * ranks).reshape(ranks, ranks)
    _, label_G = linear_sum_assignment(-both)
    return np.asarray(label_G[rank_LE])


@numba.njit(cache=True)
def drawn(chance_LEG, draws, seed):  # type: ignore[no-untyped-def]
    """rank_NLE: experts in random order, each to a rank with room with the probability of its row."""
    np.random.seed(seed % (1 << 32))
    layers, experts, ranks = chance_LEG.shape
    rank_NLE = np.empty((draws, layers, experts), dtype=np.int64)
    for n in range(draws):
        for layer in range(layers):
            room_G = np.full(ranks, experts // ranks)
            for e in np.random.permutation(experts):
                total = 0.0
                for g in range(ranks):
                    if room_G[g] > 0:
                        total += chance_LEG[layer, e, g] + 1e-9
                left, at = np.random.random() * total, -1
                for g in range(ranks):
                    if room_G[g] > 0:
                        at = g
                        left -= chance_LEG[layer, e, g] + 1e-9
                        if left <= 0:
                            break
                rank_NLE[n, layer, e] = at
                room_G[at] -= 1
    return rank_NLE


@numba.njit(cache=True)
def scores(mass_LUE, rank_LE, ranks):  # type: ignore[no-untyped-def]
    """score_UG: the mass of every item that each rank would serve."""
    layers, items, experts = mass_LUE.shape
    score_UG = np.zeros((items, ranks))
    for layer in range(layers):
        for u in range(items):
            for e in range(experts):
                score_UG[u, rank_LE[layer, e]] += mass_LUE[layer, u, e]
    return score_UG


@numba.njit(cache=True)
def answered(mass_LUE, share_U, rank_NLE, ranks, theta):  # type: ignore[no-untyped-def]
    """(value_N, home_NU): the items answer each placement; few items (MOST_TRADED) more thoroughly, from `STARTS` orders."""
    items = len(share_U)
    value_N, home_NU = np.full(len(rank_NLE), np.inf), np.empty((len(rank_NLE), items), dtype=np.int64)
    order_U = np.argsort(-share_U, kind="mergesort")
    few = items <= MOST_TRADED
    for n in range(len(rank_NLE)):
        score_UG = scores(mass_LUE, rank_NLE[n], ranks)
        for start in range(STARTS if few else 1):
            home_U = filled(score_UG, share_U, np.roll(order_U, -start), theta)
            if few:
                trade(score_UG, share_U, home_U, theta)
            now = value_of(score_UG, share_U, home_U, theta)
            if now < value_N[n]:
                value_N[n] = now
                home_NU[n] = home_U
    return value_N, home_NU


@numba.njit(cache=True)
def filled(score_UG, share_U, order_U, theta):  # type: ignore[no-untyped-def]
    """home_U: items in this order to where the objective grows least; twice more, each may move."""
    items, ranks = score_UG.shape
    load_G = np.full(ranks, -1.0 / ranks)
    home_U = np.full(items, -1, dtype=np.int64)
    for _ in range(3):
        for u in order_U:
            if home_U[u] >= 0:
                load_G[home_U[u]] -= share_U[u]
            at, least = 0, np.inf
            for g in range(ranks):
                uneven = abs(load_G[g] + share_U[u]) - abs(load_G[g])
                now = theta * uneven - (1.0 - theta) * score_UG[u, g]
                if now < least:
                    at, least = g, now
            home_U[u] = at
            load_G[at] += share_U[u]
    return home_U


@numba.njit(cache=True)
def value_of(score_UG, share_U, home_U, theta):  # type: ignore[no-untyped-def]
    """theta * sum_g |load_g - 1/G| + (1 - theta) * remote share (scores sum to 1)."""
    load_G, local = np.full(score_UG.shape[1], -1.0 / score_UG.shape[1]), 0.0
    for u in range(len(home_U)):
        load_G[home_U[u]] += share_U[u]
        local += score_UG[u, home_U[u]]
    return theta * np.abs(load_G).sum() + (1.0 - theta) * (1.0 - local)


@numba.njit(cache=True)
def trade(score_UG, share_U, home_U, theta):  # type: ignore[no-untyped-def]
    """Move items, or trade two, each time the best for an item, while the objective falls (home_U in place)."""
    items, ranks = score_UG.shape
    first = 0 if items <= MOST_TRADED else items
    load_G = np.full(ranks, -1.0 / ranks)
    for u in range(items):
        load_G[home_U[u]] += share_U[u]
    improved = True
    while improved:
        improved = False
        for a in range(items):
            g = home_U[a]
            to, partner, best = -1, -1, 1e-9
            for b in range(first, items + ranks):  # an item to trade with, or a rank to move to
                h = home_U[b] if b < items else b - items
                if h == g:
                    continue
                shift, gain = share_U[a], score_UG[a, h] - score_UG[a, g]
                if b < items:
                    shift -= share_U[b]
                    gain += score_UG[b, g] - score_UG[b, h]
                uneven = abs(load_G[g] - shift) + abs(load_G[h] + shift) - abs(load_G[g]) - abs(load_G[h])
                if (1.0 - theta) * gain - theta * uneven > best:
                    to, partner, best = h, b, (1.0 - theta) * gain - theta * uneven
            if to < 0:
                continue
            shift = share_U[a]
            if partner < items:
                shift -= share_U[partner]
                home_U[partner] = g
            home_U[a] = to
            load_G[g] -= shift
            load_G[to] += shift
            improved = True
