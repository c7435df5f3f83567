"""Windowed request scheduling: a whole window of waiting requests assigned at once and exactly.

Maximise, over one rank a request,

    sum_r [ share[r, g] + prefix_weight * hit[r, g] / prompt[r] - load_weight * (load_g - min load)
            - kv_weight * max(0, used_g - kv_target) ]

with at most rooms_g requests on rank g: as many as water-fill all ranks to one level, plus `slack` (in requests).
share[r, g] is the share of the request's expected assignments that rank g would serve at home; hit the prompt tokens
whose KV rank g holds already; used_g its filled share of the KV cache. A rank that the KV of a request would overflow
counts as the last resort.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped
from ..errors import UserError
from .base import RankStates
from .semantic_request import rooms

if TYPE_CHECKING:
    from ..serving import Request

UNIT = 1 << 20  # fixed point of a value of 1
LAST_RESORT = 64.0  # above any sum of the other terms that is not itself absurd


class Windowed:
    """Exact assignment of the waiting requests: affinity minus load and KV pressure, within a slack.

    window: requests assigned together (0: all that wait). load: "requests" or "tokens" (queued and cached tokens in
    units of the mean prompt at hand; a prompt counts less the tokens that the rank has cached).
    """

    def __init__(
        self,
        slack: float = 1.0,
        window: int = 0,
        load: str = "requests",
        load_weight: float = 0.0,
        kv_weight: float = 1.0,
        kv_target: float = 0.8,
        prefix_weight: float = 0.5,
    ) -> None:
        for name, number in (
            ("slack", slack),
            ("window", window),
            ("load_weight", load_weight),
            ("kv_weight", kv_weight),
            ("kv_target", kv_target),
            ("prefix_weight", prefix_weight),
        ):
            if not number >= 0:
                raise UserError(f"request_scheduler.{name}={number} must be at least 0")
        if load not in ("requests", "tokens"):
            raise UserError(f"request_scheduler.load='{load}' must be requests or tokens")
        self.slack, self.window, self.load, self.load_weight = slack, window, load, load_weight
        self.kv_weight, self.kv_target, self.prefix_weight = kv_weight, kv_target, prefix_weight

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        """A window of one."""
        return int(self.assign_window([request], None if score_G is None else score_G[None], None, ranks)[0])

    def assign_window(
        self,
        requests: Sequence[Request],
        score_RG: NDArray[np.integer] | None,
        head_counts: Sequence[NDArray[np.integer]] | None,
        ranks: RankStates,
    ) -> NDArray[np.int64]:
        """One rank a request; windows of `window` requests in order, each seeing the ones before it."""
        size = self.window or max(len(requests), 1)
        owner_R = np.empty(len(requests), dtype=np.int64)
        for begin in range(0, len(requests), size):
            part = slice(begin, begin + size)
            score = None if score_RG is None else score_RG[part]
            states = ranks.window(part)
            value_RG = self.window_values(requests[part], score, states)
            owner_R[part] = self.best(value_RG, self.rooms(requests[part], states))
            ranks = ranks.with_assigned(requests[part], owner_R[part])
        return owner_R

    def window_values(
        self, requests: Sequence[Request], score_RG: NDArray[np.integer] | None, ranks: RankStates
    ) -> NDArray[np.float64]:
        """The bracket of the module's formula."""
        value = np.zeros((len(requests), ranks.ranks))
        if score_RG is not None:
            value += score_RG / np.maximum(np.abs(score_RG).sum(axis=1, keepdims=True), 1)
        prompt_R = np.array([r.prompt_len for r in requests], dtype=np.float64)
        fresh_RG = np.broadcast_to(prompt_R[:, None], value.shape)
        if ranks.prefix_hit_tokens_RG is not None:
            value += self.prefix_weight * ranks.prefix_hit_tokens_RG / prompt_R[:, None]
            fresh_RG = fresh_RG - ranks.prefix_hit_tokens_RG
        load_G = self._load(requests, ranks)
        used_G = np.asarray(ranks.kv_tokens_G) / ranks.kv_capacity
        value -= self.load_weight * (load_G - load_G.min())
        value -= self.kv_weight * np.maximum(used_G - self.kv_target, 0)
        waiting_G = np.asarray(ranks.kv_tokens_G) + ranks.queued_tokens_G
        return value - LAST_RESORT * (waiting_G + fresh_RG > ranks.kv_capacity)

    def rooms(self, requests: Sequence[Request], ranks: RankStates) -> NDArray[np.int64]:
        """Most requests of the window that each rank may take."""
        return rooms(self._load(requests, ranks), len(requests), self.slack)

    @staticmethod
    def best(value_RG: NDArray[np.float64], rooms_G: NDArray[np.int64]) -> NDArray[np.int64]:
        return assign_capped(np.rint(value_RG * UNIT).astype(np.int32), rooms_G)

    def _load(self, requests: Sequence[Request], ranks: RankStates) -> NDArray[np.float64]:
        if self.load == "requests":
            return (np.asarray(ranks.running_G) + ranks.waiting_G).astype(np.float64)
        unit = max(float(np.mean([r.prompt_len for r in requests])), 1.0) if requests else 1.0
        return (np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G) / unit


class OracleRequest(Windowed):
    """Windowed on the true routes of each request, which only a replay knows: the bound for request scheduling."""

    sees_routes = True
