"""Re-homing on the actual gate result, folded into the combine (NetMoE's trick, for attention-TP).

Homes before the layer come from the predictor, as with `semantic`. Once the gate has chosen, the k expert ids of every
token go to all ranks (they would travel beside the SAG anyway), and each rank computes the same destinations: the rank
whose experts serve a token becomes its new home, and the combine sends the other ranks' sums there instead of back.
One row a token is saved wherever the predicted home turned out to serve none of its experts. The new home needs
nothing more: it got the token's row by the dispatch. The SAG then leaves from the new homes.

Worked example, a2a_dedup: home 0, experts on ranks 1, 1 and 2. Dispatch 0 -> 1, 0 -> 2; combine back to 0 is two rows,
to rank 1 it is one. LAR and the dispatch do not change: they belong to the predicted home.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..assign import assign_capped
from .semantic import Semantic

NEVER = -(1 << 20)  # a rank without the token's row cannot add the outputs to it


class Rehome(Semantic):
    """Exact predicted homes; after the gate, outputs return to a rank that serves the token, within the capacity."""

    rehomes = True

    def returns(self, serves_TG: NDArray[np.bool_], homes_T: NDArray[np.integer], capacity: int) -> NDArray[np.int64]:
        """returns_T: where the outputs of each token are summed, its home or a rank that serves it (exact, ties to home).

        serves_TG: whether rank g serves an expert of token t. The homes themselves keep the capacity, so a solution
        exists.
        """
        tokens = len(serves_TG)
        score_TG = np.where(serves_TG, 2, NEVER).astype(np.int32)
        at_home = np.arange(tokens), homes_T
        score_TG[at_home] = np.where(serves_TG[at_home], 3, 0)
        return assign_capped(score_TG, capacity)
