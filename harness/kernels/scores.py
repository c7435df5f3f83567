"""What a predictor's tables (semmoe/predict/tables.py) say of every token before a layer, in one launch.

    device[t]     = rank that holds most of the slots of token t in the layer before     ties: the lower rank
    chain_row[t]  = device[t] * weight + earlier_row[t] // drop
    score[t]      = token_score[row_of[token[t]]]  where the confidence of that row is higher than that of
                    chain_score[chain_row[t]], else the latter

Worked example, 2 ranks with slots 0-1 and 2-3, one layer looked back at (weight 1, drop 1): a token whose slots were [3, 0, 2]
has device 1 and row 1. Confidences 0.6 of its type's row and 0.9 of row 1 of the chain: its score is the chain's.

Memory ordering: none between programs; the slots are those of a launch before in stream order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from semmoe.predict.tables import ScoreTables

from .home import best_rank

TILE = 128  # tokens of a program


@triton.jit
def score_kernel(
    token,
    row_of,
    token_score,
    token_sure,
    chain_score,
    chain_sure,
    slots,
    held,
    earlier_row,
    score,
    chain_row,
    tokens,
    weight,
    drop,
    K: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    LOOKS_BACK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    g = tl.arange(0, W_PADDED)
    exists, rank = t < tokens, g[None, :]
    there = exists[:, None] & (rank < W)
    row = tl.load(row_of + tl.load(token + t, mask=exists, other=0)).to(tl.int64)
    chain = tl.zeros([TILE], dtype=tl.int64)
    if LOOKS_BACK:
        number = tl.where(there, 0, -1)  # ranks that only pad the table hold none
        for j in range(K):
            slot = tl.load(slots + t * K + j, mask=exists, other=0).to(tl.int64)
            number += tl.load(held + slot[:, None] * W + rank, mask=there, other=0)
        _, device = best_rank(number, rank, W_PADDED)
        device = tl.where(exists, device, 0)
        chain = device.to(tl.int64) * weight + tl.load(earlier_row + t, mask=exists, other=0) // drop
    first = tl.load(token_sure + row) > tl.load(chain_sure + chain)
    by_token = tl.load(token_score + row[:, None] * W + rank, mask=there & first[:, None], other=0)
    by_chain = tl.load(chain_score + chain[:, None] * W + rank, mask=there & ~first[:, None], other=0)
    tl.store(score + t[:, None] * W + rank, by_token + by_chain, mask=there)  # one of the two is zero
    tl.store(chain_row + t, chain, mask=exists)


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """ScoreTables of one layer on a device."""

    row_V: Tensor
    token_SG: Tensor
    token_sure_S: Tensor
    chain_SG: Tensor
    chain_sure_S: Tensor
    held_PG: Tensor | None
    weight: int
    drop: int

    @classmethod
    def of(cls, tables: ScoreTables, device: torch.device) -> DeviceTables:
        def put(table: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(table)).to(device, dtype)

        token, chain = tables.token, tables.chain
        return cls(
            put(tables.row_V, torch.int32),
            put(token.score_SG, torch.int32),
            put(token.sure_S, torch.float32),
            put(chain.rows.score_SG, torch.int32),
            put(chain.rows.sure_S, torch.float32),
            None if chain.held_PG is None else put(chain.held_PG, torch.int32),
            chain.weight,
            chain.drop,
        )


def score_tokens(
    tables: DeviceTables, token_T: Tensor, slots_Tk: Tensor, earlier_row_T: Tensor, chain_row_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ScoreTables.scores`. token_T, earlier_row_T: int64, slots_Tk: any integers; chain_row_T: where to write the rows."""
    tokens, ranks = len(token_T), tables.token_SG.shape[1]
    score_TG = torch.empty(tokens, ranks, dtype=torch.int32, device=token_T.device)
    chain_row_T = torch.empty_like(token_T) if chain_row_T is None else chain_row_T
    looks_back = tables.held_PG is not None
    score_kernel[(triton.cdiv(tokens, TILE),)](
        token_T,
        tables.row_V,
        tables.token_SG,
        tables.token_sure_S,
        tables.chain_SG,
        tables.chain_sure_S,
        slots_Tk.contiguous(),
        tables.held_PG if looks_back else tables.row_V,
        earlier_row_T,
        score_TG,
        chain_row_T,
        tokens,
        tables.weight,
        tables.drop,
        K=slots_Tk.shape[1] if looks_back else 1,
        W=ranks,
        W_PADDED=max(triton.next_power_of_2(ranks), 2),
        TILE=TILE,
        LOOKS_BACK=looks_back,
    )
    return score_TG, chain_row_T
