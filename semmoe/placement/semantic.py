"""Semantic placement: experts where the tokens that ask for them will sit.

Maximise, per layer, J = share of training assignments served at home - load_weight * sum_g max(0, load_g / mean -
load_target), where homes are the ones that scheduling would choose (at most home_cap times the mean a rank) and every
rank holds equally many experts. Homes and experts are improved in turn, each exactly given the other, from several
starts: the first quarter random, the others perturbations of the best so far. See token_homes.py (attention-TP, a home
per token and layer), request_homes.py (attention-DP, one home a request), exchange.py and replicas.py.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..profile import Profile, count_all
from ..schedule.base import capacity_of
from .base import Placement, PlacementProblem
from .groups import nodes_of
from .nodes import order_by_node
from .request_homes import RequestSide, one_hot
from .search_clock import search_s
from .token_homes import TokenSide, sample_of

MOST_STARTS = 512
EFFORT = 3e8  # operations that may go into more starts than `restarts` where starts are cheap: about a second


class Side(Protocol):
    """What is placed at once: a layer with its tokens' homes (TokenSide), all layers with requests' homes (RequestSide).

    `rank` is the rank of every expert, of one layer or of all.
    """

    @property
    def work(self) -> float:
        """Operations of one start, roughly."""

    def fresh(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """A random start."""

    def kicked(self, rank: NDArray[np.int64], share: float, rng: np.random.Generator) -> NDArray[np.int64]:
        """A start near `rank`: a share of it is shuffled."""

    def improved(self, start: NDArray[np.int64], weight: float) -> tuple[float, NDArray[np.int64]]:
        """(J, rank) reached from a start."""

    def replicated(self, rank: NDArray[np.int64], slots_a_rank: int, weight: float) -> tuple[float, NDArray[np.bool_]]:
        """(J, holds) with the free slots filled, starting from `rank`."""

    def traffic_GG(self, holds: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Assignments from home to serving rank under these holds."""


class Semantic:
    """Experts and the homes of tokens or requests placed together, for the predictor that schedules online.

    `slots` beyond one per expert become replicas (replicas.py), starting from the best placement without and from the
    best that minds no load, for replicas can carry load away. On several nodes, ranks that send each other most share
    one (nodes.py). Stops adding starts at the problem's time limit (notes["starts"] says how many were done); otherwise
    the result depends on the seed alone.

    restarts: starts of the alternation (at least: small problems get as many as some EFFORT allows); iterations:
    turns of one start; kick: largest share of experts that a perturbed start shuffles. load_weight, load_target,
    home_cap as in the module's formula; load_folds: groups of training requests on which the overload of a token-level
    placement is taken (exchange.py; homes of requests need one group, for requests of a kind are meant to load their
    rank). sample_tokens: training tokens that the alternation of a token-level placement works on; kappa: smoothing of
    their table where the predictor has no left-out predictions of its own (token_homes.py).
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
        kick: float = 0.4,
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
        self.load_weight, self.load_target, self.load_folds = float(load_weight), float(load_target), load_folds
        self.home_cap, self.sample_tokens, self.kappa = home_cap, sample_tokens, kappa

    def place(self, problem: PlacementProblem) -> Placement:
        place = self._place_requests if problem.home == "request" else self._place_tokens
        holds_LEG, planned, starts = place(problem, search_s() + problem.time_limit_s)
        holds_LEG = holds_LEG[:, : problem.model.num_experts]
        return placement_of(holds_LEG, problem, {"planned_value": planned, "starts": starts})

    def _place_tokens(self, problem: PlacementProblem, deadline: float) -> tuple[NDArray[np.bool_], float, int]:
        profile, ranks, rng = problem.profile, problem.ep_size, problem.rng()
        sample = sample_of(problem, self.sample_tokens, self.kappa, rng)
        capacity = capacity_of(len(sample.rows_S), ranks, self.home_cap)
        load_FLE = fold_loads(profile, self.load_folds, rng)
        layers, workers = profile.num_layers, min(profile.num_layers, os.cpu_count() or 1)

        def solve(layer: int) -> tuple[float, NDArray[np.bool_], int]:
            side = TokenSide(
                sample.share_SE(layer),
                profile.trace.experts_TLk[sample.rows_S, layer],
                padded(load_FLE[:, layer], ranks),
                ranks,
                capacity,
                self.load_target,
                self.iterations,
            )
            now = search_s()
            until = min(deadline, now + (deadline - now) * workers / (layers - layer))
            return self._solve(side, problem, np.random.default_rng([problem.seed, layer]), until)

        with ThreadPoolExecutor(workers) as threads:  # compiled searches hold no lock
            values, holds, starts = zip(*threads.map(solve, range(layers)), strict=True)
        return np.stack(holds), float(np.mean(values)), min(starts)

    def _place_requests(self, problem: PlacementProblem, deadline: float) -> tuple[NDArray[np.bool_], float, int]:
        profile, ranks = problem.profile, problem.ep_size
        side = RequestSide(
            profile.num_experts,
            padded(profile.request_counts_LRE(), ranks),
            padded(profile.load_LE.astype(np.float64), ranks)[:, None],
            ranks,
            capacity_of(profile.trace.num_requests, ranks, self.home_cap),
            self.load_target,
            self.iterations,
        )
        value, holds_LEG, starts = self._solve(side, problem, problem.rng(), deadline)
        return holds_LEG, value, starts

    def _solve(
        self, side: Side, problem: PlacementProblem, rng: np.random.Generator, until: float
    ) -> tuple[float, NDArray[np.bool_], int]:
        """(J, holds, starts) of one side."""
        size = problem.slots // problem.ep_size
        value, rank, starts = self._search(side, self.load_weight, rng, until)
        if problem.slots == problem.model.num_experts:
            holds = one_hot(rank, problem.ep_size)
        else:
            bases = [rank]
            if self.load_weight > 0:
                bases.append(self._search(side, 0.0, rng, until)[1])
            found = [side.replicated(base, size, self.load_weight) for base in bases]
            value, holds = max(found, key=lambda one: one[0])
        nodes = nodes_of(problem)
        if nodes > 1:
            holds = np.ascontiguousarray(holds[..., order_by_node(side.traffic_GG(holds), nodes)])
        return value, holds, starts

    def _search(
        self, side: Side, weight: float, rng: np.random.Generator, until: float
    ) -> tuple[float, NDArray[np.int64], int]:
        """(J, rank, starts): the best that any start reached."""
        starts = max(self.restarts, min(MOST_STARTS, int(EFFORT / side.work)))
        best, best_rank = side.improved(side.fresh(rng), weight)
        done = 1
        while done < starts and search_s() < until:
            if done < starts // 4 or self.kick == 0:
                start = side.fresh(rng)
            else:
                start = side.kicked(best_rank, rng.uniform(0, self.kick), rng)
            found, rank = side.improved(start, weight)
            if found > best:
                best, best_rank = found, rank
            done += 1
        return best, best_rank, done


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
    return count_all(fold_T, profile.trace.experts_TLk, folds, profile.num_experts).astype(np.float64)


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
