"""RowTransport: the part of a transport that stands once, over five primitives of a subclass.

The primitives are `_all_to_all`, `_swap_sizes`, `_reduce_scatter`, `_all_reduce` and `gather_objects`; packing, splitting and
counting are here. Sizes that the counter gets are those handed to the primitive (sent) and those of what it brought back
(received).

Letters: G ranks, N rows, M metadata entries, C elements of a row, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from semmoe.dispatch import METADATA_BYTES

from ..counting import Counter
from ..reference import shuffle
from .base import Received
from .codec import bytes_of
from .packing import as_rows, fresh, pack_bytes, row_bytes, unpack_bytes
from .plan import ShufflePlan

EMPTY_SLOT = 2**31 - 1  # metadata of an unused place in a fixed-capacity exchange


class RowTransport:
    """Packing, splitting and counting over the primitives of a subclass."""

    name = "base"
    kernel_path = "torch"

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.counter = Counter(rank, ranks)

    # Primitives. Byte tensors are flat uint8; sizes are in bytes and in rank order.

    def _all_to_all(self, flat: Tensor, send_bytes_G: Sequence[int], receive_bytes_G: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def _swap_sizes(self, sizes_Gn: Sequence[Sequence[int]]) -> list[list[int]]:
        """sizes_Gn[d]: a few numbers for rank d; returns what each rank had for this one."""
        raise NotImplementedError

    def _reduce_scatter(self, chunks_G: list[Tensor]) -> Tensor:
        """Sum over ranks of their chunk for this rank. chunks_G[d] has one shape on all ranks."""
        raise NotImplementedError

    def _all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Not for timed code."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the transport holds; it is of no use afterwards."""

    # Operations.

    def srs(self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None = None, op: str = "srs") -> Tensor:
        """Reduce-scatter under a permutation: row i of rank r is the sum over ranks of x[perm[starts[r] + i]].

        x_TH: this rank's partial sums in original order. Returns [counts[rank], H] (+ residual rows, where given).
        """
        shuffled = x_TH if plan.identity else x_TH.index_select(0, plan.perm_T)
        chunks = list(shuffled.split(plan.counts_G))
        rows = self._reduce_scatter(chunks)
        self.counter.exchange(op, row_bytes(x_TH), [len(c) for c in chunks], [len(rows)] * self.ranks)
        return rows if residual_TH is None else rows + residual_TH.index_select(0, plan.mine_T(self.rank))

    def srs_norm(
        self, x_TH: Tensor, plan: ShufflePlan, residual_TH: Tensor | None, norm_H: Tensor, op: str = "srs"
    ) -> tuple[Tensor, Tensor]:
        """(rows of `srs`, those after RMSNorm with weight norm_H): what a block's feed-forward adds to, and reads."""
        rows_nH = self.srs(x_TH, plan, residual_TH, op)
        return rows_nH, shuffle.rms_norm(rows_nH, norm_H)

    def sag(self, rows_NC: Tensor, plan: ShufflePlan, op: str = "sag") -> Tensor:
        """All-gather back into original order: out[t] = rows of rank owner[t] at slot[t]; the same on every rank."""
        return self._sag([rows_NC], plan, [op])[0]

    def sag_with_ids(
        self, rows_NC: Tensor, ids_Nk: Tensor, plan: ShufflePlan, op: str = "sag"
    ) -> tuple[Tensor, Tensor]:
        """SAG of the rows and of the int16 expert ids [n, k] of each token, in one exchange; ids count as "expert_ids"."""
        out_TC, ids_Tk = self._sag([rows_NC, ids_Nk], plan, [op, "expert_ids"])
        return out_TC, ids_Tk

    def dispatch(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_M2: Tensor, send_meta_G: Sequence[int], local_rows: int
    ) -> Received:
        """Send the first send_G[0] rows to rank 0, the next to rank 1..., each with its metadata; exact sizes.

        meta_M2: int32 pairs, send_meta_G[d] for rank d. send_G[rank] = 0: what is local does not travel; local_rows
        tells the counter how many rows stayed.
        """
        sizes_G2 = self._swap_sizes(list(zip(send_G, send_meta_G, strict=True)))
        width = row_bytes(rows_NC)
        flat = pack_bytes(bytes_of(rows_NC), send_G, bytes_of(meta_M2), send_meta_G)
        send_bytes = [n * width + m * METADATA_BYTES for n, m in zip(send_G, send_meta_G, strict=True)]
        receive_bytes = [n * width + m * METADATA_BYTES for n, m in sizes_G2]
        got = self._all_to_all(flat, send_bytes, receive_bytes)
        rows, meta, rows_G, meta_G = unpack_bytes(got, sizes_G2, width)
        received = Received(as_rows(rows, rows_NC), meta.view(torch.int32), rows_G, meta_G)
        self._count("dispatch", width, send_G, rows_G, local_rows)
        self.counter.metadata(sum(send_meta_G) * METADATA_BYTES, len(meta) * METADATA_BYTES)
        return received

    def combine(self, rows_NC: Tensor, send_G: Sequence[int], receive_G: Sequence[int], local_rows: int) -> Tensor:
        """Send rows back: sizes are those of the dispatch, turned round. Returns rows in the order of the dispatch."""
        width = row_bytes(rows_NC)
        got = self._all_to_all(bytes_of(rows_NC).view(-1), [n * width for n in send_G], [n * width for n in receive_G])
        self._count("combine", width, send_G, receive_G, local_rows)
        return as_rows(got.view(-1, width), rows_NC)

    def dispatch_slots(
        self, rows_NC: Tensor, send_G: Sequence[int], meta_N2: Tensor, capacity: int, local_rows: int
    ) -> Received:
        """As `dispatch`, into `capacity` places a pair of ranks: no exchange of sizes, one metadata entry a row.

        Here places are emulated by an all-to-all of equal splits; unused places are counted as padding.
        """
        width = row_bytes(rows_NC) + METADATA_BYTES
        places = torch.zeros(self.ranks, capacity, width, dtype=torch.uint8, device=rows_NC.device)
        places[:, :, :METADATA_BYTES].view(torch.int32)[..., 0] = EMPTY_SLOT
        filled = torch.cat([bytes_of(meta_N2), bytes_of(rows_NC)], dim=1)
        for d, part in enumerate(filled.split(list(send_G))):
            places[d, : len(part)] = part
        got = self._slots_all_to_all(places)
        meta = fresh(got[:, :METADATA_BYTES]).view(torch.int32)
        used = (meta[:, 0] != EMPTY_SLOT).nonzero().flatten()
        rows_G = torch.bincount(used // max(capacity, 1), minlength=self.ranks).tolist()
        rows = as_rows(fresh(got.index_select(0, used)[:, METADATA_BYTES:]), rows_NC)
        self._count("dispatch", row_bytes(rows_NC), send_G, rows_G, local_rows)
        self.counter.metadata(sum(send_G) * METADATA_BYTES, len(used) * METADATA_BYTES)
        self.counter.now.padding_bytes += ((self.ranks - 1) * capacity - sum(send_G)) * width
        return Received(rows, meta.index_select(0, used), rows_G, rows_G, used)

    def combine_slots(
        self, rows_NC: Tensor, received: Received, sent_G: Sequence[int], capacity: int, local_rows: int
    ) -> Tensor:
        """Send each answer back to the place that its row came in. Returns rows in the order of the dispatch."""
        width = row_bytes(rows_NC)
        places = torch.zeros(self.ranks * capacity, width, dtype=torch.uint8, device=rows_NC.device)
        assert received.places_N is not None
        places[received.places_N] = bytes_of(rows_NC)
        got = self._slots_all_to_all(places.view(self.ranks, capacity, width)).view(self.ranks, capacity, width)
        rows = torch.cat([got[d, :n] for d, n in enumerate(sent_G)])
        self._count("combine", width, received.rows_G, sent_G, local_rows)
        self.counter.now.padding_bytes += ((self.ranks - 1) * capacity - len(rows_NC)) * width
        return as_rows(rows, rows_NC)

    def gather_rows(self, rows_NC: Tensor, meta_NM: Tensor, counts_G: Sequence[int] | None) -> Received:
        """Everybody's rows and metadata on every rank. counts_G: rows of each rank; None: they are exchanged first."""
        counts = [n for (n,) in self._swap_sizes([[len(rows_NC)]] * self.ranks)] if counts_G is None else list(counts_G)
        width, meta_width = row_bytes(rows_NC), row_bytes(meta_NM)
        both = torch.cat([bytes_of(rows_NC), bytes_of(meta_NM)], dim=1)
        (got,), got_G = self._gather([both], counts)
        self.counter.exchange("dispatch", width, [len(rows_NC)] * self.ranks, got_G)
        away = self.ranks - 1
        self.counter.metadata(len(rows_NC) * away * meta_width, (sum(got_G) - len(rows_NC)) * meta_width)
        rows, meta = fresh(got[:, :width]), fresh(got[:, width:])
        return Received(as_rows(rows, rows_NC), meta.view(meta_NM.dtype), got_G, got_G)

    def reduce_rows(self, rows_TH: Tensor, counts_G: Sequence[int]) -> Tensor:
        """Sum over ranks, each rank keeping its own tokens: the way back of `gather_rows`."""
        chunks = list(rows_TH.split(list(counts_G)))
        rows = self._reduce_scatter(chunks)
        self.counter.exchange("combine", row_bytes(rows_TH), [len(c) for c in chunks], [len(rows)] * self.ranks)
        return rows

    def all_reduce(self, x_TH: Tensor) -> Tensor:
        """Sum over ranks; the input stays as it is."""
        self.counter.all_reduce(row_bytes(x_TH), len(x_TH))
        return self._all_reduce(x_TH)

    # Helpers.

    def _sag(self, parts: Sequence[Tensor], plan: ShufflePlan, ops: Sequence[str]) -> list[Tensor]:
        """Every part back in original order; one exchange brings them all."""
        gathered, got_G = self._gather([bytes_of(part) for part in parts], plan.counts_G)
        outs = []
        for part, bytes_TB, op in zip(parts, gathered, ops, strict=True):
            self.counter.exchange(op, row_bytes(part), [len(part)] * self.ranks, got_G)
            rows_TC = as_rows(bytes_TB, part)
            outs.append(rows_TC if plan.identity else rows_TC.index_select(0, plan.place_T))
        return outs

    def _gather(self, parts: Sequence[Tensor], counts_G: Sequence[int]) -> tuple[list[Tensor], list[int]]:
        """Of every part (bytes [n, B], as many rows in each) the rows of all ranks in rank order, and how many rows came
        from each. One exchange; own rows are copied, not sent."""
        widths = [part.shape[1] for part in parts]
        flat = torch.cat([part.reshape(-1) for part in parts])
        rows_G = [0 if s == self.rank else n for s, n in enumerate(counts_G)]
        away = [0 if d == self.rank else len(flat) for d in range(self.ranks)]
        got = self._all_to_all(flat.repeat(self.ranks - 1), away, [n * sum(widths) for n in rows_G])
        pieces = got.split([n * width for n in rows_G for width in widths])
        gathered = []
        for i, (part, width) in enumerate(zip(parts, widths, strict=True)):
            own_and_came = [p.view(n, width) for p, n in zip(pieces[i :: len(parts)], rows_G, strict=True)]
            own_and_came[self.rank] = part
            gathered.append(torch.cat(own_and_came))
        return gathered, [len(part) for part in own_and_came]

    def _slots_all_to_all(self, places_GKB: Tensor) -> Tensor:
        """Equal splits; the own block stays. Returns [G * K, B] in order of the sending rank."""
        ranks, capacity, width = places_GKB.shape
        sizes = [0 if d == self.rank else capacity * width for d in range(ranks)]
        keep = [d for d in range(ranks) if d != self.rank]
        got = self._all_to_all(places_GKB[keep].reshape(-1), sizes, sizes).view(ranks - 1, capacity, width)
        out = torch.cat([got[: self.rank], places_GKB[self.rank : self.rank + 1], got[self.rank :]])
        return out.view(ranks * capacity, width)

    def _count(self, op: str, width: int, sent_G: Sequence[int], got_G: Sequence[int], local_rows: int) -> None:
        sent, got = list(sent_G), list(got_G)
        sent[self.rank] += local_rows
        got[self.rank] += local_rows
        self.counter.exchange(op, width, sent, got)
