"""NetMoE-style request assignment: equal shares, nodes first, then ranks (after Liu et al., ICLR 2025).

The source moves training samples between devices so that the slower of intra- and inter-node traffic is least; it
relaxes that to two assignment problems, samples to nodes and then, inside each node, to devices, every device getting
equally many. Here the samples are the requests of a window and the traffic that of the routes measured on their head
(or expected from their prompt). Loads enter only through the equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped, narrowed
from ..errors import UserError
from .base import RankStates
from .semantic_request import rooms

if TYPE_CHECKING:
    from ..serving import Request


class NetMoe:
    """Two-stage exact assignment of a window, nodes then ranks, equally many requests a rank; loads otherwise ignored.

    ranks_per_node: null for one node. window: requests assigned together (0: all that wait).
    """

    def __init__(self, ranks_per_node: int | None = None, window: int = 0) -> None:
        if ranks_per_node is not None and ranks_per_node < 1:
            raise UserError(f"request_scheduler.ranks_per_node={ranks_per_node} must be at least 1 (null: one node)")
        if not window >= 0:
            raise UserError(f"request_scheduler.window={window} must be at least 0")
        self.ranks_per_node, self.window = ranks_per_node, window

    def assign(
        self,
        request: Request,
        score_G: NDArray[np.integer] | None,
        head_counts: NDArray[np.integer] | None,
        ranks: RankStates,
    ) -> int:
        return int(self.assign_window([request], None if score_G is None else score_G[None], None, ranks)[0])

    def assign_window(
        self,
        requests: Sequence[Request],
        score_RG: NDArray[np.integer] | None,
        head_counts: Sequence[NDArray[np.integer]] | None,
        ranks: RankStates,
    ) -> NDArray[np.int64]:
        if ranks.ranks % (self.ranks_per_node or ranks.ranks):
            raise UserError(
                f"request_scheduler.ranks_per_node={self.ranks_per_node} does not divide {ranks.ranks} ranks"
            )
        size = self.window or max(len(requests), 1)
        owner_R = np.empty(len(requests), dtype=np.int64)
        for begin in range(0, len(requests), size):
            part = slice(begin, begin + size)
            count = len(requests[part])
            score = np.zeros((count, ranks.ranks), dtype=np.int64) if score_RG is None else np.asarray(score_RG[part])
            owner_R[part] = self._two_stages(score, np.asarray(ranks.running_G) + ranks.waiting_G)
            ranks = ranks.with_assigned(requests[part], owner_R[part])
        return owner_R

    def _two_stages(self, score_RG: NDArray[np.int64], held_G: NDArray[np.integer]) -> NDArray[np.int64]:
        requests, ranks = score_RG.shape
        per_node = self.ranks_per_node or ranks
        node_of_G = np.arange(ranks) // per_node
        room_G = rooms(held_G.astype(np.float64), requests, 0.0)
        node_RN = score_RG.reshape(requests, -1, per_node).sum(axis=2)
        node_R = assign_capped(narrowed(node_RN), np.bincount(node_of_G, weights=room_G).astype(np.int64))
        owner_R = np.empty(requests, dtype=np.int64)
        for node in range(node_RN.shape[1]):
            here = node_R == node
            inside = node_of_G == node
            owner_R[here] = node * per_node + assign_capped(narrowed(score_RG[here][:, inside]), room_G[inside])
        return owner_R
