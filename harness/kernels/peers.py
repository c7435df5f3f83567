"""Rows of peers by their address: what the kernels share that read or write through a table of int64 addresses.

A table says where a buffer begins on every rank, at a multiple of 16 bytes. The hint that it does has to be given twice, for
the loaded address and for the pointer made of it; without it a row is read two bytes at a time.

Several rows are read in one step, about STEP_BYTES a block: the addresses of a row come from three loads, each of which waits
for the one before, and a link answers after more than a microsecond, so that one row at a time would leave it idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP_BYTES = 32 << 10  # 256 threads x 128 bytes: 32 registers of a thread
MOST_ROWS = 64


def step_rows(row_bytes: int, peers: int = 1) -> int:
    """Rows of a step, a power of two, each read from so many peers. Worked example: 8 rows of 2,048 bf16, 1 of 8 peers."""
    rows = STEP_BYTES // (triton.next_power_of_2(max(row_bytes, 1)) * triton.next_power_of_2(peers))
    return max(min(rows, MOST_ROWS), 1)


@triton.jit
def peer_base(table, peer, like):
    """Where the buffer of one rank begins; elements as `like` points to."""
    base = tl.multiple_of(tl.load(table + peer), 16)
    return tl.multiple_of(base.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def peer_rows(table, peer, like):
    """[ROWS, 1] where the buffers of the ranks peer [ROWS] begin."""
    base = tl.multiple_of(tl.load(table + peer)[:, None], [16, 16])
    return tl.multiple_of(base.to(tl.pointer_type(like.dtype.element_ty)), [16, 16])


@triton.jit
def by_peer(peer, there, W_PADDED: tl.constexpr):
    """int32 [ROWS, W_PADDED]: 1 where a row that is there comes from the rank."""
    return ((peer[:, None] == tl.arange(0, W_PADDED)[None, :]) & there[:, None]).to(tl.int32)
