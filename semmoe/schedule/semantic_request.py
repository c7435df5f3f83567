"""Semantic request scheduling: affinity within a load slack.

A request goes to the rank that holds most of the experts it is expected to ask for, among the ranks whose load is at
most `slack` above the least loaded. A whole window of requests is assigned at once and exactly: rank g takes at most
ceil(level) + slack - load_g of them, where level is the mean load after the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped, narrowed
from ..errors import UserError
from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class SemanticRequest:
    """The rank of the highest score among those within `slack` of the least loaded.

    load: "requests" counts running and waiting requests; "tokens" counts queued and KV tokens, in units of the mean
    length of the prompts at hand (so that `slack` is in requests either way).

    slack: how many requests above the least loaded rank (one request) or above the mean level (a window) are allowed;
    0 always takes the least loaded rank and uses the score only among equals.
    """

    def __init__(self, slack: float = 1.0, load: str = "requests") -> None:
        if not slack >= 0:
            raise UserError(f"request_scheduler.slack={slack} must be at least 0")
        if load not in ("requests", "tokens"):
            raise UserError(f"request_scheduler.load='{load}' must be requests or tokens")
        self.slack, self.load = slack, load

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        """The highest score among the ranks within the slack; ties by load, then by the lower rank."""
        load_G = self._load([request], ranks)
        admitted_G = load_G <= load_G.min() + self.slack
        value_G = np.zeros(ranks.ranks, dtype=np.int64) if score_G is None else np.asarray(score_G, dtype=np.int64)
        order = np.lexsort((load_G, -value_G, ~admitted_G))
        return int(order[0])

    def assign_window(
        self,
        requests: Sequence[Request],
        score_RG: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> NDArray[np.int64]:
        """One rank a request, of the largest summed score under the rooms that the slack leaves."""
        score = np.zeros((len(requests), ranks.ranks), dtype=np.int64) if score_RG is None else np.asarray(score_RG)
        load_G = self._load(requests, ranks)
        return assign_capped(narrowed(score), rooms(load_G, len(requests), self.slack))

    def _load(self, requests: Sequence[Request], ranks: RankStates) -> NDArray[np.float64]:
        if self.load == "requests":
            return (np.asarray(ranks.running_G) + ranks.waiting_G).astype(np.float64)
        unit = max(float(np.mean([r.prompt_len for r in requests])), 1.0) if requests else 1.0
        return (np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G) / unit


def rooms(load_G: NDArray[np.floating], window: int, slack: float) -> NDArray[np.int64]:
    """How many of `window` new requests each rank may take: water-filled to one level, plus the slack.

    Worked example: loads [3, 0, 0], window 3, slack 0: the level is 1.5, the rooms [0, 2, 2].
    """
    order = np.sort(load_G)
    level = order[0] + window
    for filled in range(1, len(order) + 1):
        level = (order[:filled].sum() + window) / filled
        if filled == len(order) or level <= order[filled]:
            break
    return np.maximum(np.ceil(level + slack - load_G - 1e-9), 0).astype(np.int64)
