"""Dispatch and combine by peer pulls: who serves what is worked out on every rank from the routes of all tokens.

Those routes travel first, k ids and weights a token (with the all-gather of the layer before, or `launch_sag`); then no
sizes have to be exchanged and nothing is read on the host:

    per assignment   work = serve_assignments(...)    places sorted by expert, aligned to blocks
                     rows = pull(...)                 a row per assignment that this rank serves
                     experts -> O[a]                  answers at the number of their assignment
                     combine(...)                     every home pulls and sums k answers a token
    de-duplicated    work = serve_tokens(...)         tokens with at least one expert here, in order
                     rows = pull(...)                 a row per such token
                     experts -> own[a], sum_own -> O[t]
                     combine(..., dedup=True)         one answer a token and serving rank

Rows come from the home's own buffer also when home and server are one rank: a local read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..reference.ranking import TokenRanking
from ..transport.packing import row_bytes
from .align import Alignment, moe_align
from .exchange import combine_kernel, pull_kernel
from .launch import ROW_WARPS, BarrierState, barrier_arguments, grid_of
from .peers import step_rows
from .rank_tokens import rank_tokens

MOST_COMBINED = 64  # ranks that the kernel keeps as bits of one word


@dataclass(frozen=True, eq=False)
class Group:
    """The step that all ranks share: its plan, slots_Tk (int32) and weights_Tk (fp32) of all T tokens in plan order 0..T-1,
    contiguous; slots of rank r are the r-th block of slots_per_rank."""

    plan: TokenRanking
    slots_Tk: Tensor
    weights_Tk: Tensor
    slots_per_rank: int
    ranks: int

    def own_slot_A(self, rank: int) -> Tensor:
        """Local slot of each of the T * k assignments, -1 where another rank serves it."""
        local_A = self.slots_Tk.view(-1) - rank * self.slots_per_rank
        return torch.where((local_A >= 0) & (local_A < self.slots_per_rank), local_A, -1)


@dataclass(frozen=True, eq=False)
class Served:
    """What this rank pulls: row p of the pulled rows is entry list_P[p], p < limit_1 * limit_times.

    An entry is an assignment (choices = k) or a token (choices = 1). alignment: of the assignments, where the list is
    sorted by expert. row_T: the pulled row of each token, where entries are tokens.
    """

    list_P: Tensor
    limit_1: Tensor
    limit_times: int
    choices: int
    entries: int
    alignment: Alignment | None = None
    row_T: Tensor | None = None

    def place_A(self) -> Tensor:
        """The pulled row of each entry, 0 where another rank serves it. Places from the limit on are undefined."""
        place_P = torch.arange(len(self.list_P), device=self.list_P.device)
        real_P = (place_P < self.limit_1 * self.limit_times) & (self.list_P >= 0) & (self.list_P < self.entries)
        place_A = torch.zeros(self.entries + 1, dtype=torch.int64, device=self.list_P.device)
        place_A[torch.where(real_P, self.list_P.long(), self.entries)] = place_P
        return place_A[: self.entries]


def serve_assignments(group: Group, rank: int, block_m: int) -> Served:
    """The assignments of this rank's slots, sorted by slot, each slot's places filled up to whole blocks."""
    alignment = moe_align(group.own_slot_A(rank), group.slots_per_rank, block_m)
    k = group.slots_Tk.shape[1]
    return Served(alignment.sorted_P, alignment.blocks_1, block_m, k, alignment.assignments, alignment)


def serve_tokens(group: Group, rank: int) -> Served:
    """The tokens with at least one slot here, in order: a ranking with the keys "here" and "elsewhere"."""
    here_T = (torch.div(group.slots_Tk, group.slots_per_rank, rounding_mode="floor") == rank).any(dim=1)
    split = rank_tokens((~here_T).to(torch.int32), 2)
    return Served(split.perm_T, split.counts_on_device_G, 1, 1, len(here_T), row_T=split.slot_T)


def pull(
    x_table_G: Tensor,
    group: Group,
    served: Served,
    rank: int,
    out_PH: Tensor,
    barrier: BarrierState | None = None,
    blocks: int | None = None,
) -> Tensor:
    """Pull the rows of `served` into out_PH (at least as many rows as list_P); int32 [blocks, W] rows that each block pulled
    from each rank."""
    if len(out_PH) < len(served.list_P):
        raise ValueError(f"out has {len(out_PH)} rows for up to {len(served.list_P)} entries")
    hidden = out_PH.shape[1]
    grid = grid_of(barrier, blocks, out_PH.device)
    pulled_BG = torch.empty(grid, group.ranks, dtype=torch.int32, device=out_PH.device)
    pull_kernel[(grid,)](
        x_table_G,
        served.list_P,
        served.limit_1,
        group.plan.owner_T,
        group.plan.slot_T,
        out_PH,
        pulled_BG,
        *barrier_arguments(barrier, pulled_BG, x_table_G),
        rank,
        served.entries,
        LIMIT_TIMES=served.limit_times,
        CHOICES=served.choices,
        H=hidden,
        BLOCK_H=triton.next_power_of_2(hidden),
        ROWS=step_rows(row_bytes(out_PH)),
        **_options(group, barrier),
    )
    return pulled_BG


def combine(
    o_table_G: Tensor,
    group: Group,
    rank: int,
    out_NH: Tensor,
    dedup: bool,
    barrier: BarrierState | None = None,
    blocks: int | None = None,
) -> Tensor:
    """Pull and sum the answers of the tokens at home here into out_NH [>= counts[rank], H]; rows pulled, int32 [blocks, W].

    O_r of every rank: [T * k, H] unweighted answers by assignment, or (dedup) [T, H] weighted partial sums by token.
    """
    start = group.plan.starts_on_device_G[rank : rank + 1]
    count = group.plan.counts_on_device_G[rank : rank + 1]
    mine_n = group.plan.perm_T  # the kernel reads from the start that it finds on the device
    return _combine(o_table_G, mine_n, start, count, group, rank, out_NH, dedup, False, barrier, blocks)


def sum_own(own_AH: Tensor, group: Group, served: Served, rank: int, out_TH: Tensor, blocks: int | None = None) -> None:
    """out[t] = sum over the choices of token t served here of weight * own[t * k + j], for the tokens of `served`."""
    table_G = torch.full((group.ranks,), own_AH.data_ptr(), dtype=torch.int64, device=own_AH.device)
    start = torch.zeros(1, dtype=torch.int64, device=own_AH.device)
    _combine(table_G, served.list_P, start, served.limit_1, group, rank, out_TH, False, True, None, blocks)


def _combine(
    table_G: Tensor,
    list_T: Tensor,
    start_1: Tensor,
    limit_1: Tensor,
    group: Group,
    rank: int,
    out_NH: Tensor,
    dedup: bool,
    own_only: bool,
    barrier: BarrierState | None,
    blocks: int | None,
) -> Tensor:
    if dedup and group.ranks > MOST_COMBINED:
        raise ValueError(f"{group.ranks} ranks; answers by token are summed over at most {MOST_COMBINED}")
    hidden = out_NH.shape[1]
    grid = grid_of(barrier, blocks, out_NH.device)
    pulled_BG = torch.empty(grid, group.ranks, dtype=torch.int32, device=out_NH.device)
    combine_kernel[(grid,)](
        table_G,
        list_T,
        start_1,
        limit_1,
        group.slots_Tk,
        group.weights_Tk,
        out_NH,
        pulled_BG,
        *barrier_arguments(barrier, pulled_BG, table_G),
        rank,
        SLOTS_PER_RANK=group.slots_per_rank,
        K=group.slots_Tk.shape[1],
        DEDUP=dedup,
        OWN_ONLY=own_only,
        H=hidden,
        BLOCK_H=triton.next_power_of_2(hidden),
        **_options(group, barrier),
    )
    return pulled_BG


def _options(group: Group, barrier: BarrierState | None) -> dict[str, int | bool]:
    return {
        "W": group.ranks,
        "W_PADDED": triton.next_power_of_2(group.ranks),
        "SYNC": barrier is not None,
        "SPIN_LIMIT": barrier.spin_limit if barrier else 0,
        "num_warps": ROW_WARPS,
    }
