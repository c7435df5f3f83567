"""Twins of dispatch and combine by pulls in plain torch: what each rank reads from whom, and the sums it makes.

Letters as in `harness.kernels.launch_exchange`: T tokens of the whole group, A = T * k assignments, P pulled rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ranking import TokenRanking


def pull(peers_G: Sequence[Tensor], plan: TokenRanking, token_P: Tensor) -> tuple[Tensor, list[int]]:
    """(rows [P, H] of the given tokens from their homes' buffers, rows pulled from each rank)."""
    rows_PH = torch.empty(len(token_P), peers_G[0].shape[1], dtype=peers_G[0].dtype, device=peers_G[0].device)
    owner_P, slot_P = plan.owner_T[token_P].long(), plan.slot_T[token_P]
    pulled_G = []
    for rank, x_nH in enumerate(peers_G):
        place = (owner_P == rank).nonzero().flatten()
        rows_PH[place] = x_nH[slot_P[place]]
        pulled_G.append(len(place))
    return rows_PH, pulled_G


def sum_own(own_AH: Tensor, slots_Tk: Tensor, weights_Tk: Tensor, slots_per_rank: int, rank: int) -> Tensor:
    """[T, H]: weighted sum of the answers of `rank` to each token, in fp32 and in order of choice; 0 where it has none."""
    tokens, k = slots_Tk.shape
    total_TH = torch.zeros(tokens, own_AH.shape[1], dtype=torch.float32, device=own_AH.device)
    for j in range(k):
        mine_T = slots_Tk[:, j] // slots_per_rank == rank
        total_TH[mine_T] += weights_Tk[mine_T, j, None] * own_AH.view(tokens, k, -1)[mine_T, j].float()
    return total_TH.to(own_AH.dtype)


def combine(
    peers_G: Sequence[Tensor], mine_n: Tensor, slots_Tk: Tensor, weights_Tk: Tensor, slots_per_rank: int, dedup: bool
) -> tuple[Tensor, list[int]]:
    """(sums [n, H] of the tokens mine_n, answers pulled from each rank). peers_G: [A, H], or (dedup) [T, H] of each rank."""
    k, ranks = slots_Tk.shape[1], len(peers_G)
    rank_nk = slots_Tk[mine_n].long() // slots_per_rank
    total_nH = torch.zeros(len(mine_n), peers_G[0].shape[1], dtype=torch.float32, device=peers_G[0].device)
    pulled_G = [0] * ranks
    if dedup:
        for rank, o_TH in enumerate(peers_G):
            served_n = (rank_nk == rank).any(dim=1)
            total_nH[served_n] += o_TH[mine_n[served_n]].float()
            pulled_G[rank] = int(served_n.sum())
        return total_nH.to(peers_G[0].dtype), pulled_G
    for j in range(k):
        for rank, o_AH in enumerate(peers_G):
            at = rank_nk[:, j] == rank
            total_nH[at] += weights_Tk[mine_n[at], j, None] * o_AH[mine_n[at] * k + j].float()
            pulled_G[rank] += int(at.sum())
    return total_nH.to(peers_G[0].dtype), pulled_G
