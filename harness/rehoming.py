"""Combine to a new home: every rank sends its sum of a token to the rank where the token goes on (schedule/rehome.py).

All ranks know homes, new homes and, from the expert ids that they exchanged after the gate, who serves which token; so
sizes and order of the rows need no further exchange. Rows travel in order of (destination, token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from semmoe.dispatch import DispatchSpec

from .timing import PhaseTimer
from .transport.base import Transport
from .transport.codec import decode, encode, torch_dtype
from .transport.plan import ShufflePlan


def serving(slots_Tk: Tensor, slots_per_rank: int, ranks: int) -> Tensor:
    """serves_TG bool: whether a rank serves an expert of a token."""
    serves_TG = torch.zeros(len(slots_Tk), ranks, dtype=torch.bool, device=slots_Tk.device)
    return serves_TG.scatter_(1, torch.div(slots_Tk, slots_per_rank, rounding_mode="floor"), True)


def combine_elsewhere(
    out_RH: Tensor,
    homes: ShufflePlan,
    returns: ShufflePlan,
    serves_TG: Tensor,
    transport: Transport,
    spec: DispatchSpec,
    timer: PhaseTimer,
) -> Tensor:
    """[n, H] of the tokens that return to this rank, in the order of `returns`.

    out_RH: fp32 sums as an AllToAll dispatch with dedup leaves them: this rank's tokens first, then those that arrived, by
    sending rank, each in the order of `homes`.
    """
    me, ranks = transport.rank, transport.ranks
    held = [homes.mine_T(me), *(homes.mine_T(s)[serves_TG[homes.mine_T(s), me]] for s in range(ranks) if s != me)]
    token_R = torch.cat(held)
    row_N = serves_TG[token_R, me].nonzero().flatten()
    goes_N, token_N = returns.owner_T[token_R[row_N]], token_R[row_N]
    order_N = (goes_N * homes.tokens + token_N).argsort()
    goes_N, token_N, row_N = goes_N[order_N], token_N[order_N], row_N[order_N]
    stays_N = goes_N == me
    rows_NC = encode(out_RH.index_select(0, row_N[~stays_N]), str(spec.combine_dtype))
    send_G = torch.bincount(goes_N, minlength=ranks).tolist()
    arrive = [(serves_TG[:, s] & (returns.owner_T == me)).nonzero().flatten() for s in range(ranks)]
    receive_G = [len(token) for token in arrive]
    local, send_G[me], receive_G[me] = send_G[me], 0, 0
    timer.lap("permute")
    got_NC = transport.combine(rows_NC, send_G, receive_G, local)
    timer.lap("combine")
    y_nH = torch.zeros(returns.counts_G[me], out_RH.shape[1], dtype=torch.float32, device=out_RH.device)
    y_nH.index_add_(0, returns.slot_T[token_N[stays_N]], out_RH.index_select(0, row_N[stays_N]))
    came_N = torch.cat([token for s, token in enumerate(arrive) if s != me])
    got_NH = decode(got_NC, out_RH.shape[1], str(spec.combine_dtype), torch.float32)
    y_nH.index_add_(0, returns.slot_T[came_N], got_NH)
    timer.lap("permute")
    return y_nH.to(torch_dtype(spec.activation_dtype))
