"""Twins of the pull kernels: SRS and SAG in plain torch over the peers' tensors.

Worked example, 2 ranks, 3 tokens, owner [1, 0, 1], so perm [1, 0, 2], counts [1, 2], starts [0, 1], slot [0, 0, 1]:
SRS on rank 1 gives rows [X_0[0] + X_1[0], X_0[2] + X_1[2]]; SAG gives everybody [Z_1[0], Z_0[0], Z_1[1]].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transport.plan import ShufflePlan


def srs(
    peers_G: Sequence[Tensor], plan: ShufflePlan, rank: int, residual_TH: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """(rows [counts[rank], H] = sum_r X_r[mine] (+ residual[mine]), rows pulled from each rank).

    peers_G: X_r [T, H] of every rank. The sum runs in fp32 and in rank order, then takes the input's dtype.
    """
    mine_n = plan.mine_T(rank)
    total_nH = torch.zeros(len(mine_n), peers_G[0].shape[1], dtype=torch.float32, device=peers_G[0].device)
    pulled_G = []
    for x_TH in peers_G:
        rows_nH = x_TH.index_select(0, mine_n)
        total_nH += rows_nH
        pulled_G.append(len(rows_nH))
    if residual_TH is not None:
        total_nH += residual_TH.index_select(0, mine_n)
    return total_nH.to(peers_G[0].dtype), pulled_G


def sag(peers_G: Sequence[Tensor], plan: ShufflePlan) -> tuple[Tensor, list[int]]:
    """(out [T, C] in original order, rows pulled from each rank). peers_G: Z_r [>= counts[r], C] of every rank."""
    out_TC = torch.empty(plan.tokens, *peers_G[0].shape[1:], dtype=peers_G[0].dtype, device=peers_G[0].device)
    pulled_G = []
    for rank, z_nC in enumerate(peers_G):
        rows_nC = z_nC[: plan.counts_G[rank]]
        out_TC[plan.mine_T(rank)] = rows_nC
        pulled_G.append(len(rows_nC))
    return out_TC, pulled_G


def rms_norm(rows_nH: Tensor, weight_H: Tensor, eps: float = 1e-6) -> Tensor:
    """rows / sqrt(mean(rows ** 2) + eps) * weight, in fp32, then the rows' dtype."""
    rows = rows_nH.float()
    scale_n1 = (rows.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    return (rows * scale_n1 * weight_H.float()).to(rows_nH.dtype)
