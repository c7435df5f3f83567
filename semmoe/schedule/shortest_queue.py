"""Shortest queue: the rank with the fewest tokens queued or held in KV cache."""

from __future__ import annotations

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
        tokens_G = np.asarray(ranks.queued_tokens_G) + ranks.kv_tokens_G
        requests_G = np.asarray(ranks.running_G) + ranks.waiting_G
        return int(np.lexsort((requests_G, tokens_G))[0])
