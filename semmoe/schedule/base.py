"""Protocols of both kinds of scheduler, and the plan that a token scheduler returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

if TYPE_CHECKING:
    from ..serving import Request


@dataclass(frozen=True, eq=False)
class RankStates:
    """Load of every rank when a request is assigned; the scheduler must not change it.

    queued_tokens_G  prompt tokens that wait or are still to be computed
    running_G        requests that run;  waiting_G requests that wait
    kv_tokens_G      tokens of KV cache in use;  kv_capacity tokens of KV cache on a rank
    prefix_hit_tokens_RG  prompt tokens of each request at hand whose KV a rank holds already (None: no prefix cache)
    """

    queued_tokens_G: NDArray[np.integer]
    running_G: NDArray[np.integer]
    waiting_G: NDArray[np.integer]
    kv_tokens_G: NDArray[np.integer]
    kv_capacity: int
    prefix_hit_tokens_RG: NDArray[np.integer] | None = None

    @property
    def ranks(self) -> int:
        return len(self.running_G)

    def window(self, part: slice) -> RankStates:
        """The same for some of the requests at hand."""
        hits = self.prefix_hit_tokens_RG
        return self if hits is None else replace(self, prefix_hit_tokens_RG=hits[part])

    def with_assigned(self, requests: Sequence[Request], owner_R: NDArray[np.integer]) -> RankStates:
        """The states once these requests wait at their ranks."""
        queued_G, waiting_G = np.array(self.queued_tokens_G), np.array(self.waiting_G)
        for request, owner in zip(requests, owner_R, strict=True):
            queued_G[owner] += request.prompt_len
            waiting_G[owner] += 1
        return replace(self, queued_tokens_G=queued_G, waiting_G=waiting_G)


class RequestScheduler(Protocol):
    """A class with this method, named by Hydra's `_target_`, is a request scheduler.

    `assign_window(requests, score_RG, head_counts, ranks) -> ranks` is optional; without it the requests that arrived
    since the last step are assigned one by one, each seeing the ones before it. head_counts [L, E]: measured experts of
    the request's head or prefill. Optional too: `fit(profile, placement)`, called before the first assignment;
    `needs_head` and `sees_routes` (true: head_counts and scores come from the whole prompt, or from all true routes);
    `values(...)` with assign's arguments, the value of each rank for the decision trace (decisions.py).
    """

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int: ...


class TokenScheduler(Protocol):
    """A class with this method, named by Hydra's `_target_`, is a token scheduler.

    Optional `sees_routes` (true: scores count the true experts of the layer, which only a replay knows) and `keeps_order`
    (true: homes never permute the tokens, so that the exchanges around the layer are plain ones).
    """

    def homes(self, score_TG: NDArray[np.int32], capacity: int) -> Plan: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """Shuffle of T tokens over G ranks: rank r holds tokens perm_T[starts_G[r] : starts_G[r] + counts_G[r]].

    owner_T[t] is the home of token t and slot_T[t] its row there: perm_T[starts_G[owner_T[t]] + slot_T[t]] == t.
    Worked example, 4 tokens on 2 ranks with owner [1, 0, 1, 0]: perm [1, 3, 0, 2], slot [0, 0, 1, 1], counts [2, 2],
    starts [0, 2].
    """

    perm_T: NDArray[np.integer]
    slot_T: NDArray[np.integer]
    owner_T: NDArray[np.integer]
    counts_G: NDArray[np.integer]
    starts_G: NDArray[np.integer]

    @classmethod
    def from_owner(cls, owner_T: NDArray[np.integer], ranks: int) -> Plan:
        """The stable plan of a given home per token."""
        owner_T = owner_T.astype(np.int64)
        counts_G = np.bincount(owner_T, minlength=ranks).astype(np.int64)
        starts_G = np.concatenate([[0], np.cumsum(counts_G)[:-1]]).astype(np.int64)
        perm_T = np.argsort(owner_T, kind="stable").astype(np.int64)
        slot_T = np.empty(len(owner_T), dtype=np.int64)
        slot_T[perm_T] = np.arange(len(owner_T)) - np.repeat(starts_G, counts_G)
        return cls(perm_T, slot_T, owner_T, counts_G, starts_G)


def capacity_of(tokens: int, ranks: int, home_cap: float) -> int:
    """Most tokens a rank may be home to: home_cap times the mean, at least enough to hold all."""
    return max(-(-tokens // ranks), int(np.floor(home_cap * tokens / ranks)))


def assign_all(
    scheduler: RequestScheduler,
    requests: Sequence[Request],
    score_RG: NDArray[np.int64] | None,
    ranks: RankStates,
    heads: Sequence[NDArray[np.integer]] | None = None,
) -> list[int]:
    """Assign a window of requests through assign_window where the scheduler has it, else one by one.

    heads: counts_LE of each request, where its head (or prefill) was measured. UserError when the scheduler returns
    anything but one rank a request.
    """
    window = getattr(scheduler, "assign_window", None)
    if window is not None:
        chosen = [
            _checked(scheduler, rank, r, ranks.ranks)
            for rank, r in zip(window(requests, score_RG, heads, ranks), requests, strict=True)
        ]
        return chosen
    chosen = []
    for i, request in enumerate(requests):
        now = ranks.window(slice(i, i + 1))
        rank = scheduler.assign(
            request, None if score_RG is None else score_RG[i], None if heads is None else heads[i], now
        )
        chosen.append(_checked(scheduler, rank, request, ranks.ranks))
        ranks = ranks.with_assigned([request], np.array(chosen[-1:]))
    return chosen


def _checked(scheduler: RequestScheduler, rank: int, request: Request, ranks: int) -> int:
    if not isinstance(rank, (int, np.integer)) or not 0 <= rank < ranks:
        raise UserError(
            f"request scheduler {type(scheduler).__name__} returned rank {rank} for request {request.id}; "
            f"0..{ranks - 1} is right"
        )
    return int(rank)
