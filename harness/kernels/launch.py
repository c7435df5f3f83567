"""Launching SRS and SAG: the grid, the barrier's buffers, and the checks that keep ranks from hanging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from semmoe.errors import UserError

from ..reference.ranking import TokenRanking
from ..transport.base import PeerTransport, address_table
from ..transport.packing import row_bytes
from ..transport.plan import ShufflePlan
from .barrier import barrier_kernel
from .peers import step_rows
from .sag import sag_kernel
from .srs import srs_kernel

ROW_WARPS = 4 if torch.version.hip else 8  # 256 threads x 16 bytes: one row of 2,048 bf16
BLOCKS = 16  # of a CPU in the interpreter, where they run one after another
WAITING_BLOCKS = 64  # of a GPU: all resident at once on any; with STEP_BYTES each, enough under way to fill NVLink
FREE_BLOCKS = 512  # of a GPU, where no block waits for another


@dataclass(frozen=True, eq=False)
class BarrierState:
    """Pads, epochs and status of the fused barrier: one for each stream, shared by SRS and SAG."""

    pad_table_G: Tensor
    own_pads_BG: Tensor
    epochs_B: Tensor
    status_1: Tensor
    blocks: int
    spin_limit: int = 0

    def check(self) -> None:
        """RuntimeError that names who did not come when a block gave up waiting (spin_limit > 0 only). Reads device memory."""
        if int(self.status_1):
            late_G = (self.own_pads_BG < self.epochs_B[:, None]).any(dim=0).nonzero().flatten().tolist()
            who = f"rank {', '.join(map(str, late_G))}" if late_G else "a rank that came later"
            raise RuntimeError(f"{who} did not arrive at the barrier inside a kernel within the spin limit")


def make_barrier(transport: PeerTransport, blocks: int = BLOCKS, spin_limit: int = 0) -> BarrierState:
    """Collective, with the same number of blocks on all ranks, whatever their token counts: blocks wait by number.

    Refuses virtual ranks: their programs run one after another, so a wait would never end.
    """
    if transport.name == "virtual":
        raise UserError("virtual ranks cannot wait for each other inside a kernel; launch without a barrier")
    pads = transport.alloc(blocks, transport.ranks, torch.int32)
    transport.barrier()
    return barrier_state(pads.peers_G, transport.rank, blocks, spin_limit)


def barrier_state(pads_G: Sequence[Tensor], rank: int, blocks: int, spin_limit: int = 0) -> BarrierState:
    """State of a rank over everybody's pads, int32 [blocks, W], which are zero on all ranks by now."""
    epochs_B, status_1 = (torch.zeros(n, dtype=torch.int32, device=pads_G[0].device) for n in (blocks, 1))
    return BarrierState(address_table(pads_G), pads_G[rank], epochs_B, status_1, blocks, spin_limit)


def grid_of(barrier: BarrierState | None, blocks: int | None, device: torch.device) -> int:
    """Blocks of a launch: those of its barrier, or those asked for, or what suits the device."""
    if barrier is not None:
        return barrier.blocks
    return blocks or (FREE_BLOCKS if device.type == "cuda" else BLOCKS)


def launch_barrier(state: BarrierState, rank: int) -> None:
    """The barrier as a kernel of its own: what is launched on the stream after it sees what all ranks wrote before."""
    ranks = len(state.pad_table_G)
    barrier_kernel[(state.blocks,)](
        state.pad_table_G,
        state.epochs_B,
        state.status_1,
        rank,
        W=ranks,
        W_PADDED=triton.next_power_of_2(ranks),
        SPIN_LIMIT=state.spin_limit,
    )


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """RMSNorm fused into SRS: weight_H multiplies, rows go to out_NH [>= counts[rank], H]."""

    weight_H: Tensor
    out_NH: Tensor
    eps: float = 1e-6


def launch_srs(
    x_table_G: Tensor,
    like_TH: Tensor,
    plan: ShufflePlan | TokenRanking,
    rank: int,
    residual_TH: Tensor | None = None,
    out_NH: Tensor | None = None,
    barrier: BarrierState | None = None,
    exit_barrier: bool = False,
    blocks: int | None = None,
    norm: RMSNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """(rows [counts[rank], H], int32 [blocks, W] rows that each block pulled from each rank, as it counted them).

    With a TokenRanking, whose counts stay on the device, the rows come as all of `out`, undefined from counts[rank] on: [T, H],
    or out_NH, in which the caller has room for counts[rank].

    x_table_G: addresses of X [T, H], contiguous, dtype and width of like_TH. out_NH: where to write (rows beyond
    counts[rank] stay as they are), default a new tensor. barrier: wait for the peers inside the kernel.
    """
    ranks, hidden = len(x_table_G), like_TH.shape[1]
    if isinstance(plan, ShufflePlan):
        rows = plan.counts_G[rank]
    else:
        rows = plan.tokens if out_NH is None else len(out_NH)
    out = like_TH.new_empty(rows, hidden) if out_NH is None else out_NH
    for tensor in (out,) if norm is None else (out, norm.out_NH):
        if len(tensor) < rows:
            raise ValueError(f"out has {len(tensor)} rows, rank {rank} gets {rows}")
    grid = grid_of(barrier, blocks, like_TH.device)
    pulled_BG = torch.empty(grid, ranks, dtype=torch.int32, device=like_TH.device)
    srs_kernel[(grid,)](
        x_table_G,
        plan.perm_T,
        plan.starts_on_device_G,
        plan.counts_on_device_G,
        out if residual_TH is None else residual_TH,
        out if norm is None else norm.weight_H,
        out,
        out if norm is None else norm.out_NH,
        pulled_BG,
        *barrier_arguments(barrier, pulled_BG, x_table_G),
        rank,
        0.0 if norm is None else norm.eps,
        H=hidden,
        BLOCK_H=triton.next_power_of_2(hidden),
        ROWS=step_rows(row_bytes(like_TH), ranks),
        W=ranks,
        W_PADDED=triton.next_power_of_2(ranks),
        RESIDUAL=residual_TH is not None,
        NORM=norm is not None,
        **_barrier_options(barrier, exit_barrier),
        num_warps=ROW_WARPS,
    )
    return out[:rows], pulled_BG


@dataclass(frozen=True, eq=False)
class CarriedIds:
    """Expert ids beside SAG: addresses of every rank's int16 [>= counts[r], k], and where all tokens' go, int16 [T, k]."""

    table_G: Tensor
    out_Tk: Tensor


def launch_sag(
    z_table_G: Tensor,
    like_NC: Tensor,
    plan: ShufflePlan | TokenRanking,
    rank: int = 0,
    out_TC: Tensor | None = None,
    barrier: BarrierState | None = None,
    exit_barrier: bool = False,
    blocks: int | None = None,
    ids: CarriedIds | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, C] in original order, int32 [blocks, W] rows that each block pulled from each rank, as it counted them).

    rank: only the barrier needs it. ids: carried in the same launch; not counted in the rows.
    """
    ranks, width = len(z_table_G), like_NC.shape[1]
    out = like_NC.new_empty(plan.tokens, width) if out_TC is None else out_TC
    if len(out) < plan.tokens:
        raise ValueError(f"out has {len(out)} rows for {plan.tokens} tokens")
    if ids is not None and len(ids.out_Tk) < plan.tokens:
        raise ValueError(f"ids have {len(ids.out_Tk)} rows for {plan.tokens} tokens")
    grid = grid_of(barrier, blocks, like_NC.device)
    pulled_BG = torch.empty(grid, ranks, dtype=torch.int32, device=like_NC.device)
    sag_kernel[(grid,)](
        z_table_G,
        plan.owner_T,
        plan.slot_T,
        out,
        z_table_G if ids is None else ids.table_G,
        out if ids is None else ids.out_Tk,
        pulled_BG,
        *barrier_arguments(barrier, pulled_BG, z_table_G),
        rank,
        plan.tokens,
        C=width,
        BLOCK_C=triton.next_power_of_2(width),
        ROWS=step_rows(row_bytes(like_NC)),
        W=ranks,
        W_PADDED=triton.next_power_of_2(ranks),
        IDS=0 if ids is None else ids.out_Tk.shape[1],
        IDS_PADDED=1 if ids is None else triton.next_power_of_2(ids.out_Tk.shape[1]),
        **_barrier_options(barrier, exit_barrier),
        num_warps=ROW_WARPS,
    )
    return out[: plan.tokens], pulled_BG


def barrier_arguments(barrier: BarrierState | None, any_int32: Tensor, any_table: Tensor) -> tuple[Tensor, ...]:
    """(pad table, epochs, status); without a barrier the kernel never looks at what stands in their place."""
    if barrier is None:
        return any_table, any_int32, any_int32
    return barrier.pad_table_G, barrier.epochs_B, barrier.status_1


def _barrier_options(barrier: BarrierState | None, exit_barrier: bool) -> dict[str, int | bool]:
    if exit_barrier and barrier is None:
        raise ValueError("an exit barrier needs a barrier")
    return {"SYNC": barrier is not None, "EXIT": exit_barrier, "SPIN_LIMIT": barrier.spin_limit if barrier else 0}
