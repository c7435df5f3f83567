"""Shortest queue: the rank with the fewest tokens queued or held in KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import RankStates

if TYPE_CHECKING:
    from ..serving import Request


class ShortestQueue:
    """Least queued prompt tokens + KV tokens; ties by fewest requests, then by the lower rank."""

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        return self.assign_window([request], None, None, ranks)[0]

    def assign_window(
        self,
        requests: Sequence[Request],
        score_RG: NDArray[np.integer] | None,
        head_counts: Sequence[NDArray[np.integer]] | None,
        ranks: RankStates,
    ) -> list[int]:
        """One by one, each seeing those before it."""
        tokens_G = (np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G).tolist()
        requests_G = (np.asarray(ranks.running_G) + ranks.waiting_G).tolist()
        chosen = []
        for request in requests:
            *_, rank = min(zip(tokens_G, requests_G, range(len(tokens_G)), strict=True))
            tokens_G[rank] += request.prompt_len
            requests_G[rank] += 1
            chosen.append(rank)
        return chosen
