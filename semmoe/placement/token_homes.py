"""Attention-TP's placement of one layer: alternate homes of sampled training tokens and ranks of experts.

Homes come from the scores that the online predictor would give had it not seen the token's own request, so that a
placement is judged on tokens as unseen as those it will serve; what then counts as local are their actual experts. A
predictor says so by `left_out` (predict/fusion.py); for others a token table stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from ..assign import capped_owners
from ..predict.base import FIXED_POINT
from ..profile import Profile
from .base import PlacementProblem
from .cocluster import covariance_EE
from .exchange import best_experts, exchange, value
from .nodes import traffic_between
from .partition import improve
from .replicas import RAMP, add_replicas, expected_loads, held_value, trade


class Sample(Protocol):
    """S training tokens (rows of the trace) and how each would be predicted in a layer had its request not been seen."""

    @property
    def rows_S(self) -> NDArray[np.int64]: ...

    def share_SE(self, layer: int) -> NDArray[np.float32]:
        """Expected share of the token's choices that go to each expert."""


def sample_of(problem: PlacementProblem, size: int, kappa: float, rng: np.random.Generator) -> Sample:
    """At most `size` training tokens with the left-out predictions of the problem's predictor, or of a token table."""
    if hasattr(problem.predictor, "left_out"):
        rows_S, _ = problem.predictor.left_out(0)
        kept = np.sort(rng.choice(len(rows_S), size=min(size, len(rows_S)), replace=False))
        return PredictedSample(rows_S[kept], kept, problem.predictor)
    return TokenSample.draw(problem.profile, size, kappa, rng)


@dataclass(frozen=True, eq=False)
class PredictedSample:
    """Tokens that the predictor left out of its own tables; kept: those of them that are used."""

    rows_S: NDArray[np.int64]
    kept: NDArray[np.int64]
    predictor: Any

    def share_SE(self, layer: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.predictor.left_out(layer)[1][self.kept])


@dataclass(frozen=True, eq=False)
class TokenSample:
    """S sampled training tokens, and the training tokens of the same type in the same request (to be left out).

    rows_S: rows of the trace; members: rows of the trace grouped by (type, request); the group of sample s is
    members[begin_S[s] : end_S[s]]; kappa: weight of the marginal in a row of the table, in tokens.
    """

    rows_S: NDArray[np.int64]
    members_T: NDArray[np.int64]
    begin_S: NDArray[np.int64]
    end_S: NDArray[np.int64]
    profile: Profile
    kappa: float

    @classmethod
    def draw(cls, profile: Profile, size: int, kappa: float, rng: np.random.Generator) -> TokenSample:
        tokens = profile.trace.num_tokens
        rows_S = np.sort(rng.choice(tokens, size=min(size, tokens), replace=False))
        key_T = profile.type_T * profile.trace.num_requests + profile.trace.request_T
        members_T = np.argsort(key_T, kind="stable")
        ordered_T = key_T[members_T]
        begin_S = np.searchsorted(ordered_T, key_T[rows_S], side="left")
        end_S = np.searchsorted(ordered_T, key_T[rows_S], side="right")
        return cls(rows_S, members_T, begin_S, end_S, profile, kappa)

    def share_SE(self, layer: int) -> NDArray[np.float32]:
        """Leave-one-request-out P of every sampled token (the formula of predict/token_table.py)."""
        profile, load_E = self.profile, self.profile.load_LE[layer]
        return leave_out_share(
            self.rows_S,
            self.members_T,
            self.begin_S,
            self.end_S,
            profile.type_T,
            profile.trace.experts_TLk[:, layer],
            profile.token_counts_UE(layer),
            profile.token_count_U,
            load_E / load_E.sum(),
            self.kappa,
        )


@dataclass(frozen=True, eq=False)
class TokenSide:
    """One layer of attention-TP (semantic.Side): shares and experts of the sampled tokens, loads per fold (phantoms
    included), at most `capacity` tokens at a home."""

    share_SE: NDArray[np.float32]
    experts_Sk: NDArray[np.integer]
    load_FE: NDArray[np.float64]
    ranks: int
    capacity: int
    target: float
    iterations: int

    @property
    def work(self) -> float:
        return float(self.iterations * len(self.share_SE) * (self.load_FE.shape[1] + 8 * self.ranks))

    @cached_property
    def _covariance_EE(self) -> NDArray[np.float64]:
        return covariance_EE(self.share_SE, self.load_FE.shape[1])

    def fresh(self, rng: np.random.Generator) -> NDArray[np.int64]:
        start_E = rng.permutation(np.arange(self.load_FE.shape[1]) % self.ranks)
        improve(self._covariance_EE, start_E, self.ranks, 0)
        return start_E

    def kicked(self, rank: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.int64]:
        return shuffled(rank, share, rng)

    def improved(self, start: NDArray[np.int64], weight: float) -> tuple[float, NDArray[np.int64]]:
        fixed = (self.ranks, self.capacity, weight, self.target, self.iterations)
        found: tuple[float, NDArray[np.int64]] = alternate(self.share_SE, self.experts_Sk, self.load_FE, start, *fixed)
        return found

    def replicated(self, rank: NDArray[np.int64], slots_a_rank: int, weight: float) -> tuple[float, NDArray[np.bool_]]:
        experts = self.share_SE.shape[1]
        load_FE = self.load_FE[:, :experts]
        given = (self.share_SE, self.experts_Sk, load_FE)
        holds_EG = rank[:experts, None] == np.arange(self.ranks)
        _, _, local_EG = alternate_held(*given, holds_EG, self.capacity, weight, self.target, 1)
        add_replicas(local_EG, load_FE, holds_EG, slots_a_rank - holds_EG.sum(axis=0), weight, self.target)
        value = 0.0
        for part in RAMP:
            value, holds_EG, _ = alternate_held(
                *given, holds_EG, self.capacity, part * weight, self.target, self.iterations
            )
        return value, holds_EG

    def traffic_GG(self, holds: NDArray[np.bool_]) -> NDArray[np.float64]:
        load_FE, holds = self.load_FE[:, : self.share_SE.shape[1]], holds[: self.share_SE.shape[1]]
        _, _, local_EG = alternate_held(
            self.share_SE, self.experts_Sk, load_FE, holds, self.capacity, 0.0, self.target, 1
        )
        return traffic_between(local_EG, expected_loads(local_EG, load_FE, holds)[0])


def shuffled(items: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """A share of the items (at least two) trade places at random."""
    moved = rng.choice(len(items), size=min(len(items), max(2, round(share * len(items)))), replace=False)
    kicked = items.copy()
    kicked[moved] = items[rng.permutation(moved)]
    return kicked


@numba.njit(cache=True, nogil=True)
def leave_out_share(rows_S, members_T, begin_S, end_S, type_T, experts_Tk, counts_UE, tokens_U, prior_E, kappa):  # type: ignore[no-untyped-def]
    samples, experts, k = len(rows_S), len(prior_E), experts_Tk.shape[1]
    share = np.empty((samples, experts), dtype=np.float32)
    for s in range(samples):
        u = type_T[rows_S[s]]
        row = counts_UE[u].astype(np.float64)
        for m in range(begin_S[s], end_S[s]):
            for j in range(k):
                row[experts_Tk[members_T[m], j]] -= 1.0
        rest = tokens_U[u] - (end_S[s] - begin_S[s])
        for e in range(experts):
            share[s, e] = (row[e] / k + kappa * prior_E[e]) / (rest + kappa)
    return share


@numba.njit(cache=True)
def rank_scores(share_SE, rank_E, k, ranks):  # type: ignore[no-untyped-def]
    """Fixed-point scores [S, G]: k times the share of each rank's experts (phantom experts beyond E have none)."""
    samples, experts = share_SE.shape
    score = np.empty((samples, ranks), dtype=np.int32)
    total = np.empty(ranks, dtype=np.float64)
    for s in range(samples):
        total[:] = 0.0
        for e in range(experts):
            total[rank_E[e]] += share_SE[s, e]
        for g in range(ranks):
            score[s, g] = np.int32(np.rint(total[g] * k * FIXED_POINT))
    return score


@numba.njit(cache=True)
def local_counts(experts_Sk, home_S, experts, ranks):  # type: ignore[no-untyped-def]
    """local_EG: assignments to e from tokens at home g."""
    local = np.zeros((experts, ranks), dtype=np.int64)
    for s in range(experts_Sk.shape[0]):
        for j in range(experts_Sk.shape[1]):
            local[experts_Sk[s, j], home_S[s]] += 1
    return local


@numba.njit(cache=True, nogil=True)
def alternate(share_SE, experts_Sk, load_FE, rank_E, ranks, capacity, weight, target, iterations):  # type: ignore[no-untyped-def]
    """(J, rank_E): the best placement met while homes and experts are improved in turn, starting from rank_E."""
    k = experts_Sk.shape[1]
    capacity_G = np.full(ranks, capacity, dtype=np.int64)
    best_value, best_rank = -1e30, rank_E.copy()
    for _ in range(iterations):
        home_S = capped_owners(rank_scores(share_SE, rank_E, k, ranks), capacity_G)
        local_EG = local_counts(experts_Sk, home_S, len(rank_E), ranks)
        now = value(local_EG, load_FE, rank_E, weight, target)
        if now <= best_value + 1e-9:
            break
        best_value, best_rank = now, rank_E.copy()
        kept = rank_E.copy()
        exchange(local_EG, load_FE, kept, weight, target)
        fresh = best_experts(local_EG, load_FE, weight, target)
        if value(local_EG, load_FE, fresh, weight, target) > value(local_EG, load_FE, kept, weight, target):
            rank_E = fresh
        else:
            rank_E = kept
    return best_value, best_rank


@numba.njit(cache=True)
def held_scores(share_SE, holds_EG, k):  # type: ignore[no-untyped-def]
    """Fixed-point scores [S, G]: k times the share of the experts that each rank holds."""
    samples, experts = share_SE.shape
    ranks = holds_EG.shape[1]
    score = np.empty((samples, ranks), dtype=np.int32)
    total = np.empty(ranks, dtype=np.float64)
    for s in range(samples):
        total[:] = 0.0
        for e in range(experts):
            for g in range(ranks):
                if holds_EG[e, g]:
                    total[g] += share_SE[s, e]
        for g in range(ranks):
            score[s, g] = np.int32(np.rint(total[g] * k * FIXED_POINT))
    return score


@numba.njit(cache=True, nogil=True)
def alternate_held(share_SE, experts_Sk, load_FE, holds_EG, capacity, weight, target, iterations):  # type: ignore[no-untyped-def]
    """(J, holds_EG, local_EG): alternate() for placements with replicas (replicas.py), starting from holds_EG."""
    experts, ranks = holds_EG.shape
    capacity_G = np.full(ranks, capacity, dtype=np.int64)
    best, best_EG, best_local_EG = -1e30, holds_EG, np.zeros((experts, ranks), dtype=np.int64)
    for _ in range(iterations):
        home_S = capped_owners(held_scores(share_SE, holds_EG, experts_Sk.shape[1]), capacity_G)
        local_EG = local_counts(experts_Sk, home_S, experts, ranks)
        now = held_value(local_EG, load_FE, holds_EG, weight, target)
        if now <= best + 1e-9:
            break
        best, best_EG, best_local_EG = now, holds_EG, local_EG
        holds_EG = holds_EG.copy()
        trade(local_EG, load_FE, holds_EG, weight, target)
    return best, best_EG, best_local_EG
