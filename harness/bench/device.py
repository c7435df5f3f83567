"""Our shuffle and exchange as device work only, from and to plain tensors: timed between GPUs, in graphs too.

Inputs are copied into fixed buffers that peers read, as callers of a library's symmetric operators copy theirs; `srs_in_place`
leaves that copy out, as a layer does whose last product writes there. In the exchange an expert scales a row by its number + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.fixed import FixedBuffers, Sizes, total_bytes
from ..device.pulled import rank_order, route_words, serve
from ..kernels.launch import launch_sag, launch_srs
from ..kernels.launch_exchange import Group, Served, combine, pull
from ..transport.plan import ShufflePlan
from ..transport.staged import StagedTransport


def buffer_sizes(tokens: int, hidden: int, top_k: int, ranks: int, dtype: torch.dtype) -> Sizes:
    """Of T tokens of the group, T / G at home on each rank."""
    home = tokens // ranks
    return {
        "x": (tokens, hidden, dtype),
        "rows": (home, hidden, dtype),
        "done": (home, hidden, dtype),
        "routes": (home, 2 * top_k, torch.int32),
        "answers": (tokens * top_k, hidden, dtype),
        "ids": (0, top_k, torch.int16),
    }


class BenchDevice:
    """Over a transport whose kernels wait for their peers. Collective; every call may be captured."""

    def __init__(self, transport: StagedTransport, plan: ShufflePlan, sizes: Sizes, slots_per_rank: int) -> None:
        assert transport.fused is not None
        self.rank, self.ranks, self.barrier = transport.rank, transport.ranks, transport.fused
        self.fixed = FixedBuffers.in_memory(transport.fixed_memory(total_bytes(sizes)), transport.rank, sizes)
        self.plan, self.tokens, self.top_k = plan, sizes["x"][0], sizes["ids"][1]
        device = transport.device
        in_order = rank_order([sizes["rows"][0]] * self.ranks, device)
        slots_Tk = torch.zeros(self.tokens, self.top_k, dtype=torch.int32, device=device)
        weights_Tk = torch.zeros(self.tokens, self.top_k, device=device)
        self.group = Group(in_order, slots_Tk, weights_Tk, slots_per_rank, self.ranks)
        self._all = torch.full((1,), self.tokens, device=device)
        plan.counts_on_device_G, plan.starts_on_device_G  # noqa: B018  copied to the device now, not while a graph captures

    def srs(self, x_TH: Tensor) -> Tensor:
        self.fixed.x.local.copy_(x_TH)
        return self.srs_in_place()

    def srs_in_place(self) -> Tensor:
        x = self.fixed.x
        return launch_srs(x.table_G, x.local, self.plan, self.rank, barrier=self.barrier)[0]

    def sag(self, rows_nH: Tensor) -> Tensor:
        self.fixed.done.local.copy_(rows_nH)
        return self._sag()

    def srs_sag(self, x_TH: Tensor) -> Tensor:
        """SRS writes where SAG reads."""
        x = self.fixed.x
        x.local.copy_(x_TH)
        launch_srs(x.table_G, x.local, self.plan, self.rank, out_NH=self.fixed.done.local, barrier=self.barrier)
        return self._sag()

    def exchange(self, x_nH: Tensor, slots_nk: Tensor, weights_nk: Tensor, dedup: bool) -> Tensor:
        """Weighted sums of the answers to the rows at home: routes, rows and answers travel, nothing is read on the host."""
        fixed, group, rank = self.fixed, self.group, self.rank
        fixed.rows.local.copy_(x_nH)
        fixed.routes.local.copy_(route_words(slots_nk, weights_nk))
        everything = Served(group.plan.perm_T, self._all, 1, 1, self.tokens)
        both_T = fixed.routes.local.new_empty(self.tokens, 2 * self.top_k)
        pull(fixed.routes.table_G, group, everything, rank, both_T, self.barrier)
        group.slots_Tk.copy_(both_T[:, : self.top_k])
        group.weights_Tk.copy_(both_T[:, self.top_k :].view(torch.float32))
        served = serve(group, rank, dedup)
        rows_PH = x_nH.new_empty(len(served.list_P), x_nH.shape[1])
        pull(fixed.rows.table_G, group, served, rank, rows_PH)
        self._answer(served, rows_PH)
        out_nH = torch.empty_like(x_nH)
        combine(fixed.answers.table_G, group, rank, out_nH, dedup, self.barrier)
        return out_nH

    def _answer(self, served: Served, rows_PH: Tensor) -> None:
        group, answers_AH = self.group, self.fixed.answers.local
        scale_Tk = group.slots_Tk + 1
        if served.row_T is None:
            torch.mul(rows_PH.index_select(0, served.place_A()), scale_Tk.view(-1, 1), out=answers_AH)
            return
        own_Tk = torch.div(group.slots_Tk, group.slots_per_rank, rounding_mode="floor") == self.rank
        own_T = (group.weights_Tk * scale_Tk * own_Tk).sum(dim=1, keepdim=True)
        answers_AH[: self.tokens].copy_(rows_PH.index_select(0, served.row_T) * own_T)

    def _sag(self) -> Tensor:
        done = self.fixed.done
        return launch_sag(done.table_G, done.local, self.plan, self.rank, barrier=self.barrier)[0]
