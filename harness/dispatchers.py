"""Dispatchers: bring every assignment's row to the rank that serves it, and the weighted outputs back home.

Each has `dispatch(x_nH, slots_nk, weights_nk, ...) -> Work` and `combine(out_RH) -> y_nH`. Between the two the layer
runs its experts: row_A, slot_A and weight_A of Work say which row each assignment reads, which local slot multiplies
it, and with what weight its output is added (fp32) to row row_A of `out_RH`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError

from .reference.permute import Packing, counts_by_sender, pack, unpack_meta
from .timing import PhaseTimer
from .transport.base import Received, Transport
from .transport.codec import check_row_dtype, decode, encode, torch_dtype


@dataclass(frozen=True, eq=False)
class Work:
    """Rows at hand and the assignments that read them. num_rows: rows of the fp32 sum that `combine` takes."""

    rows_RH: Tensor
    row_A: Tensor
    slot_A: Tensor
    weight_A: Tensor
    num_rows: int


class Dispatcher(Protocol):
    def dispatch(
        self, x_nH: Tensor, slots_nk: Tensor, weights_nk: Tensor, counts_G: Sequence[int] | None, timer: PhaseTimer
    ) -> Work: ...

    def combine(self, out_RH: Tensor, timer: PhaseTimer) -> Tensor: ...


def make_dispatcher(spec: DispatchSpec, transport: Transport, slots_per_rank: int, max_tokens: int) -> Dispatcher:
    """The dispatcher of a spec. max_tokens: the most tokens of one rank in a step (low_latency's places)."""
    for name in (spec.dispatch_dtype, spec.combine_dtype):
        check_row_dtype(str(name))
    if spec.dispatcher == "allgather_rs":
        return AllGatherReduceScatter(spec, transport, slots_per_rank)
    if spec.dispatcher == "low_latency":
        return LowLatency(spec, transport, slots_per_rank, max_tokens)
    return AllToAll(spec, transport, slots_per_rank)


class AllToAll:
    """a2a_assignment: a row per remote assignment. a2a_dedup: a row per distinct remote rank of a token, whose experts'
    outputs are weighted and summed there, so that one row comes back."""

    def __init__(self, spec: DispatchSpec, transport: Transport, slots_per_rank: int) -> None:
        self.spec, self.transport, self.slots_per_rank = spec, transport, slots_per_rank
        self.dedup = spec.dispatcher == "a2a_dedup"
        self._dtype = torch_dtype(spec.activation_dtype)

    def dispatch(
        self, x_nH: Tensor, slots_nk: Tensor, weights_nk: Tensor, counts_G: Sequence[int] | None, timer: PhaseTimer
    ) -> Work:
        transport = self.transport
        packing = pack(slots_nk, weights_nk, self.slots_per_rank, transport.rank, transport.ranks)
        token_N = packing.remote_token_A[packing.remote_first_A] if self.dedup else packing.remote_token_A
        rows_NC = encode(x_nH, str(self.spec.dispatch_dtype)).index_select(0, token_N)
        timer.lap("permute")
        received = self._send(rows_NC, packing)
        timer.lap("dispatch")
        work = self._work(x_nH, received, packing)
        self._home = (len(x_nH), token_N, received, packing)
        timer.lap("permute")
        return work

    def combine(self, out_RH: Tensor, timer: PhaseTimer) -> Tensor:
        tokens, token_N, received, packing = self._home
        rows_NC = encode(out_RH[tokens:], str(self.spec.combine_dtype))
        timer.lap("permute")
        back_NC = self._return(rows_NC, received, packing)
        timer.lap("combine")
        back_NH = decode(back_NC, out_RH.shape[1], str(self.spec.combine_dtype), torch.float32)
        y_nH = out_RH[:tokens].index_add_(0, token_N, back_NH).to(self._dtype)
        timer.lap("permute")
        return y_nH

    def _send(self, rows_NC: Tensor, packing: Packing) -> Received:
        return self.transport.dispatch(
            rows_NC,
            packing.send_pairs_G if self.dedup else packing.send_assignments_G,
            packing.remote_meta_A2,
            packing.send_assignments_G,
            self._local(packing),
        )

    def _return(self, rows_NC: Tensor, received: Received, packing: Packing) -> Tensor:
        sent_G = packing.send_pairs_G if self.dedup else packing.send_assignments_G
        return self.transport.combine(rows_NC, received.rows_G, sent_G, self._local(packing))

    def _local(self, packing: Packing) -> int:
        return packing.local_pairs if self.dedup else len(packing.local_token_A)

    def _work(self, x_nH: Tensor, received: Received, packing: Packing) -> Work:
        """Local assignments read x itself (rows 0..n-1), remote ones the rows that arrived (n..)."""
        rank, tokens = self.transport.rank, len(x_nH)
        rows_RH = decode(received.rows_NC, x_nH.shape[1], str(self.spec.dispatch_dtype), x_nH.dtype)
        slot_A, weight_A, first_A = unpack_meta(received.meta_M2, rank * self.slots_per_rank)
        row_A = first_A.cumsum(0) - 1 if self.dedup else torch.arange(len(slot_A), device=slot_A.device)
        self._count(packing, received, first_A)
        return Work(
            torch.cat([x_nH, rows_RH]),
            torch.cat([packing.local_token_A, row_A + tokens]),
            torch.cat([packing.local_slot_A, slot_A]),
            torch.cat([packing.local_weight_A, weight_A]),
            tokens + len(rows_RH),
        )

    def _count(self, packing: Packing, received: Received, first_A: Tensor) -> None:
        now, rank = self.transport.counter.now, self.transport.rank
        now.assignments_sent_G, now.pairs_sent_G = packing.send_assignments_G.copy(), packing.send_pairs_G.copy()
        now.assignments_served_G = received.meta_G.copy()
        now.pairs_served_G = counts_by_sender(first_A, received.meta_G)
        for assignments_G, pairs_G in (
            (now.assignments_sent_G, now.pairs_sent_G),
            (now.assignments_served_G, now.pairs_served_G),
        ):
            assignments_G[rank] += len(packing.local_token_A)
            pairs_G[rank] += packing.local_pairs


class LowLatency(AllToAll):
    """A row per remote assignment into fixed places, no exchange of sizes; decode only.

    A token has at most min(k, slots of a rank) assignments on one rank, so max_tokens times that many places suffice.
    """

    def __init__(self, spec: DispatchSpec, transport: Transport, slots_per_rank: int, max_tokens: int) -> None:
        super().__init__(spec, transport, slots_per_rank)
        self.max_tokens = max_tokens
        self.capacity = max_tokens * min(spec.top_k, slots_per_rank)

    def _send(self, rows_NC: Tensor, packing: Packing) -> Received:
        if max(packing.send_assignments_G) > self.capacity:
            raise UserError(
                f"low_latency: {max(packing.send_assignments_G)} rows for one rank, {self.capacity} places (max_tokens="
                f"{self.max_tokens}); it is meant for decode: raise max_tokens, or use a2a_dedup for prefill"
            )
        return self.transport.dispatch_slots(
            rows_NC, packing.send_assignments_G, packing.remote_meta_A2, self.capacity, len(packing.local_token_A)
        )

    def _return(self, rows_NC: Tensor, received: Received, packing: Packing) -> Tensor:
        return self.transport.combine_slots(
            rows_NC, received, packing.send_assignments_G, self.capacity, len(packing.local_token_A)
        )


class AllGatherReduceScatter:
    """Every row and its k slots and weights to every rank; each sums its experts' outputs of all tokens, and a
    reduce-scatter brings every token's sum home. Its bytes do not depend on the placement."""

    def __init__(self, spec: DispatchSpec, transport: Transport, slots_per_rank: int) -> None:
        if spec.combine_dtype == "fp8":
            raise UserError("allgather_rs sums on the way back: combine_dtype=fp8 cannot; use the activation dtype")
        self.spec, self.transport, self.slots_per_rank = spec, transport, slots_per_rank
        self._dtype = torch_dtype(spec.activation_dtype)

    def dispatch(
        self, x_nH: Tensor, slots_nk: Tensor, weights_nk: Tensor, counts_G: Sequence[int] | None, timer: PhaseTimer
    ) -> Work:
        meta = torch.cat([slots_nk.to(torch.int32), weights_nk.float().contiguous().view(torch.int32)], dim=1)
        rows_nC = encode(x_nH, str(self.spec.dispatch_dtype))
        timer.lap("permute")
        received = self.transport.gather_rows(rows_nC, meta, counts_G)
        timer.lap("dispatch")
        self._counts_G = received.rows_G
        rows_TH = decode(received.rows_NC, x_nH.shape[1], str(self.spec.dispatch_dtype), x_nH.dtype)
        k = slots_nk.shape[1]
        weights_Tk = received.meta_M2[:, k:].contiguous().view(torch.float32)
        work, mine_Tk = local_work(
            rows_TH, received.meta_M2[:, :k].long(), weights_Tk, self.slots_per_rank, self.transport.rank
        )
        served_T = mine_Tk.sum(dim=1)
        now = self.transport.counter.now
        now.assignments_served_G = [int(part.sum()) for part in served_T.split(received.rows_G)]
        now.pairs_served_G = counts_by_sender(served_T > 0, received.rows_G)
        timer.lap("permute")
        return work

    def combine(self, out_RH: Tensor, timer: PhaseTimer) -> Tensor:
        rows_TH = encode(out_RH, str(self.spec.combine_dtype))
        timer.lap("permute")
        y_nH = self.transport.reduce_rows(rows_TH, self._counts_G).to(self._dtype)
        timer.lap("combine")
        return y_nH


def local_work(
    rows_TH: Tensor, slots_Tk: Tensor, weights_Tk: Tensor, slots_per_rank: int, rank: int
) -> tuple[Work, Tensor]:
    """The assignments of all T tokens that this rank serves, and the mask that picked them."""
    mine_Tk = torch.div(slots_Tk, slots_per_rank, rounding_mode="floor") == rank
    token_A, choice_A = mine_Tk.nonzero(as_tuple=True)
    slot_A = slots_Tk[token_A, choice_A] - rank * slots_per_rank
    return Work(rows_TH, token_A, slot_A, weights_Tk[token_A, choice_A].float(), len(rows_TH)), mine_Tk
