"""Oracle: the true experts of the layer, handed over by the runner. The bound for every predictor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..profile import Profile
from ..trace import RoutingTrace
from .base import ExpertPredictor


class Oracle(ExpertPredictor):
    """The true experts of every token, which only a replay knows: the bound for prediction.

    `sees_routes` asks the planner for them: `history` then holds the experts of the layer itself, [T, 1, k].
    """

    lookback = 0
    sees_routes = True

    def fit(self, profile: Profile) -> None:
        self.top_k, self.num_experts = profile.trace.top_k, profile.num_experts

    @classmethod
    def of(cls, trace: RoutingTrace) -> Oracle:
        """An oracle for tokens of this trace."""
        oracle = cls()
        oracle.fit(Profile.fit(trace))
        return oracle

    def experts(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None
    ) -> NDArray[np.float32]:
        if history is None:
            raise UserError("predictor oracle has no routes to look at: it works on tokens of a trace only")
        share_TE = np.zeros((len(token_ids_T), self.num_experts), dtype=np.float32)
        np.put_along_axis(share_TE, history[:, 0].astype(np.int64), 1.0 / self.top_k, axis=1)
        return share_TE
