"""LayerKernels: the Triton kernels in the places of torch's operations inside one MoELayer. Imports Triton."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.dispatch import DispatchSpec

from ..kernels.grouped import experts
from ..kernels.home import home_tokens
from ..kernels.rank_tokens import rank_tokens
from ..transport.base import Transport
from ..transport.plan import HomeScores, ShufflePlan
from ..transport.pull import PullTransport, launching
from .pulled import PullExchange, can_pull


class LayerKernels:
    """Homes, token ranking and experts by kernels; `exchange`: dispatch to combine too, where `can_pull` says so."""

    def __init__(self, spec: DispatchSpec, transport: Transport, slots_per_rank: int) -> None:
        self.exchange: PullExchange | None = None
        if isinstance(transport, PullTransport) and can_pull(spec):
            self.exchange = PullExchange(spec, transport, slots_per_rank)

    def plan(self, homes_T: NDArray[np.integer] | HomeScores, ranks: int, device: torch.device) -> ShufflePlan:
        with launching(device):
            if isinstance(homes_T, HomeScores):
                owner_T = home_tokens(homes_T.score_TG, homes_T.capacity)
            else:
                owner_T = torch.from_numpy(np.ascontiguousarray(homes_T, dtype=np.int64)).to(device)
            return rank_tokens(owner_T, ranks).to_plan()

    def experts(self, rows_RH: Tensor, row_A: Tensor, slot_A: Tensor, w13_S2FH: Tensor, w2_SHF: Tensor) -> Tensor:
        """Outputs in the order of the assignments."""
        with launching(rows_RH.device):
            return experts(rows_RH, row_A, slot_A, w13_S2FH, w2_SHF)
