"""What `gpu.py` and the CPU benchmark time between ranks: our shuffle and exchange against what libraries offer.

    srs       x [T, H] on every rank -> sums of its own tokens       index + reduce-scatter; symmetric-memory operators
    sag       own rows -> all rows in original order                 all-gather + index; symmetric-memory operators
    srs_sag   x -> every token's sum on every rank                   both of them; the same without index; one all-reduce
    exchange  own rows -> weighted sum of k experts' answers         index, library all-to-all, answers, all-to-all, index

All variants of a case start and end with the same tensors and are called in turn, so that what disturbs one disturbs all. On
GPUs ours is device work only (device.py), and every variant is timed twice: called, and replayed from a CUDA graph where
one can hold it; without a graph short operations time their launches.
Homes are a random permutation with equal counts: libraries' reduce-scatter and all-gather know no others. In "exchange"
an expert scales a row by its number + 1, so that a wrong one shows and rows alone count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.dispatch import DispatchSpec

from ..device.fixed import Sizes, total_bytes
from ..dispatchers import AllToAll
from ..timing import PhaseTimer
from ..transport.base import Transport
from ..transport.choose import make_transport, rank_device
from ..transport.plan import ShufflePlan
from ..transport.staged import StagedTransport
from ..worker import RankContext
from .rank_timing import RankCase, Timed, check_and_time
from .symmetric_ops import OPERATORS, SymmetricOps, missing

if TYPE_CHECKING:
    from .device import BenchDevice

CASES = ("srs", "sag", "srs_sag", "exchange")


@dataclass(frozen=True)
class RankSizes:
    """tokens T of the group (divisible by the ranks), hidden H, experts E, k choices; calls of each variant and mode."""

    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    transport: str
    kernels: str
    rounds: int


def bench_ranks(context: RankContext, sizes: RankSizes, cases: tuple[str, ...] = CASES) -> list[Timed]:
    """Task of every rank: check every variant of every case, then time all of them in turn, if all are right anywhere."""
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for two of the calls
    device = rank_device(sizes.transport, context.ranks)
    transport = _transport(context, sizes)
    done = []
    for case in cases_of(sizes, transport, device):
        if case.name not in cases:
            continue
        done.append(check_and_time(case, sizes.rounds, device))
        context.progress(len(done), len(cases))
    return done


def cases_of(sizes: RankSizes, transport: Transport, device: torch.device) -> list[RankCase]:
    """Every rank makes the data of all ranks from one seed, on the CPU."""
    ranks, rank, tokens = transport.ranks, transport.rank, sizes.tokens
    data = torch.Generator().manual_seed(1)
    homes_T = np.random.default_rng(0).permutation(np.repeat(np.arange(ranks), tokens // ranks))
    plan = ShufflePlan.from_homes(homes_T, ranks, device)
    x_GTH = torch.randn(ranks, tokens, sizes.hidden, generator=data).to(sizes.dtype)
    x_TH, sum_TH = x_GTH[rank].to(device), x_GTH.float().sum(0).to(device, sizes.dtype)
    mine_nH = sum_TH[plan.mine_T(rank)]
    out_nH, ranked_TH = torch.empty_like(mine_nH), torch.empty_like(x_TH)
    device_work = _device_work(sizes, transport, plan)

    def index_reduce_scatter() -> Tensor:
        dist.reduce_scatter_tensor(out_nH, x_TH.index_select(0, plan.perm_T))
        return out_nH

    def all_gather_index(rows_nH: Tensor = mine_nH) -> Tensor:
        dist.all_gather_into_tensor(ranked_TH, rows_nH)
        return ranked_TH.index_select(0, plan.place_T)

    def plain() -> Tensor:
        """Without a permutation; the same tensors for these tokens, since all of them come back."""
        dist.reduce_scatter_tensor(out_nH, x_TH)
        dist.all_gather_into_tensor(ranked_TH, out_nH)
        return ranked_TH

    def all_reduce() -> Tensor:
        total_TH = x_TH.clone()
        dist.all_reduce(total_TH)
        return total_TH

    made: dict[str, dict[str, Callable[[], Tensor]]] = {
        "srs": {"ours": lambda: transport.srs(x_TH, plan), "index_reduce_scatter": index_reduce_scatter},
        "sag": {"ours": lambda: transport.sag(mine_nH, plan), "all_gather_index": all_gather_index},
        "srs_sag": {
            "ours": lambda: transport.sag(transport.srs(x_TH, plan), plan),
            "unfused": lambda: all_gather_index(index_reduce_scatter()),
            "plain": plain,
            "all_reduce": all_reduce,
        },
    }
    if device_work is not None:
        work = device_work
        work.fixed.x.local.copy_(x_TH)
        made["srs"] |= {"ours": lambda: work.srs(x_TH), "ours_in_place": work.srs_in_place}
        made["sag"]["ours"] = lambda: work.sag(mine_nH)
        made["srs_sag"]["ours"] = lambda: work.srs_sag(x_TH)
    skipped: dict[str, dict[str, str]] = {name: {} for name in made}
    library = None
    for operator, case in OPERATORS.items():
        reason = missing(operator, device, ranks)
        name = f"symm_mem.{operator}"
        if reason is not None:
            skipped[case][name] = reason
            continue
        library = library or SymmetricOps(tokens, sizes.hidden, sizes.dtype, device, plan.perm_T, plan.place_T)
        made[case][name] = library.variant(operator, mine_nH if case == "sag" else x_TH)
    low = sizes.dtype == torch.bfloat16
    expected = {"srs": mine_nH, "sag": sum_TH, "srs_sag": sum_TH}
    tolerance = 5e-2 if low else 1e-5  # libraries sum bf16 in their own order
    once = (tokens - tokens // ranks) * sizes.hidden * sizes.dtype.itemsize  # equal counts; all-reduce is both passes
    crossed = {"srs": once, "sag": once, "srs_sag": 2 * once}
    cases = [
        RankCase(
            name,
            calls,
            expected[name],
            tolerance,
            skipped[name],
            port_bytes=dict.fromkeys(calls, crossed[name]),
            outputs=(out_nH, ranked_TH),
        )
        for name, calls in made.items()
    ]
    return [*cases, exchange_case(sizes, transport, sum_TH.chunk(ranks)[rank].contiguous(), device_work)]


def exchange_case(
    sizes: RankSizes, transport: Transport, x_nH: Tensor, device_work: BenchDevice | None = None
) -> RankCase:
    """Dispatch and combine by the dispatchers over the transport, or by kernels as device work, against the library's
    all-to-all."""
    ranks, rank, device = transport.ranks, transport.rank, x_nH.device
    per_rank, tokens = sizes.experts // ranks, len(x_nH)
    slots_Gnk = [_drawn_slots(sizes, tokens, source) for source in range(ranks)]
    slots_nk = slots_Gnk[rank].to(device)
    weights_nk = torch.rand(tokens, sizes.top_k, generator=torch.Generator().manual_seed(2 + rank)).to(device)
    weights_nk = weights_nk / weights_nk.sum(dim=1, keepdim=True) / sizes.experts
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[sizes.dtype]

    def dispatched(dispatcher: str) -> Tensor:
        spec = DispatchSpec(
            flow="dp", dispatcher=dispatcher, hidden=sizes.hidden, top_k=sizes.top_k, activation_dtype=dtype
        )
        exchange, timer = AllToAll(spec, transport, per_rank), PhaseTimer()
        timer.start_layer()
        work = exchange.dispatch(x_nH, slots_nk, weights_nk, None, timer)
        scale_A = work.weight_A * (work.slot_A + rank * per_rank + 1)
        answers_RH = torch.zeros(work.num_rows, sizes.hidden, device=device)
        answers_RH.index_add_(0, work.row_A, work.rows_RH.index_select(0, work.row_A).float() * scale_A[:, None])
        return exchange.combine(answers_RH, timer)

    def library() -> Tensor:
        """A row per assignment, own ones too: what the library's call knows."""
        slot_A = slots_nk.reshape(-1)
        order_A = slot_A.argsort(stable=True)
        sent = torch.bincount(slot_A // per_rank, minlength=ranks)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        sent_G, came_G = sent.tolist(), came.tolist()
        rows_AH = x_nH.index_select(0, order_A // sizes.top_k)
        got_RH, got_slot_R = x_nH.new_empty(sum(came_G), sizes.hidden), slot_A.new_empty(sum(came_G))
        dist.all_to_all_single(got_slot_R, slot_A[order_A], came_G, sent_G)
        dist.all_to_all_single(got_RH, rows_AH, came_G, sent_G)
        answers_RH = (got_RH.float() * (got_slot_R + 1)[:, None]).to(x_nH.dtype)
        back_AH = torch.empty_like(rows_AH)
        dist.all_to_all_single(back_AH, answers_RH, sent_G, came_G)
        weighted_AH = back_AH.float() * weights_nk.reshape(-1)[order_A][:, None]
        y_nH = torch.zeros(tokens, sizes.hidden, device=device)
        return y_nH.index_add_(0, order_A // sizes.top_k, weighted_AH).to(x_nH.dtype)

    expected_nH = x_nH.float() * (weights_nk * (slots_nk + 1)).sum(dim=1, keepdim=True)
    variants: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: dispatched("a2a_dedup"),
        "ours_by_assignment": lambda: dispatched("a2a_assignment"),
        "index_all_to_all": library,
    }
    if device_work is not None:
        for name, dedup in (("ours", True), ("ours_by_assignment", False)):
            variants[name] = partial(device_work.exchange, x_nH, slots_nk, weights_nk, dedup)
    row_bytes = sizes.hidden * sizes.dtype.itemsize
    port_rows = {dedup: _port_rows([slots // per_rank for slots in slots_Gnk], dedup) for dedup in (True, False)}
    crossed = {name: 2 * port_rows[name == "ours"] * row_bytes for name in variants}
    tolerance = 5e-2 if dtype == "bf16" else 1e-5
    return RankCase("exchange", variants, expected_nH.to(x_nH.dtype), tolerance, port_bytes=crossed)


def _drawn_slots(sizes: RankSizes, tokens: int, rank: int) -> Tensor:
    """[n, k] different experts of each token at home on a rank, every expert alike."""
    drawn = torch.rand(tokens, sizes.experts, generator=torch.Generator().manual_seed(1000 + rank))
    return drawn.argsort(1)[:, : sizes.top_k]


def _port_rows(serving_Gnk: list[Tensor], dedup: bool) -> int:
    """Rows that cross the busiest rank's port in a dispatch: a row per remote assignment, or per distinct remote rank."""
    ranks = len(serving_Gnk)
    served_GnG = [torch.nn.functional.one_hot(serving_nk, ranks).sum(1) for serving_nk in serving_Gnk]
    rows_GG = torch.stack([(served.clamp(max=1) if dedup else served).sum(0) for served in served_GnG])
    rows_GG.fill_diagonal_(0)
    return int(torch.maximum(rows_GG.sum(0), rows_GG.sum(1)).max())


def _device_work(sizes: RankSizes, transport: Transport, plan: ShufflePlan) -> BenchDevice | None:
    """Ours between GPUs; None between CPU processes, where the transport's own calls are timed."""
    if sizes.kernels != "triton":
        return None
    from .device import BenchDevice  # imports Triton

    assert isinstance(transport, StagedTransport)
    return BenchDevice(transport, plan, _buffers(sizes, transport.ranks), sizes.experts // transport.ranks)


def _buffers(sizes: RankSizes, ranks: int) -> Sizes:
    from .device import buffer_sizes

    return buffer_sizes(sizes.tokens, sizes.hidden, sizes.top_k, ranks, sizes.dtype)


def _transport(context: RankContext, sizes: RankSizes) -> Transport:
    """Opened once a pool and size."""
    width = sizes.hidden * sizes.dtype.itemsize + 64 * sizes.top_k
    key = (sizes.transport, sizes.kernels, sizes.tokens * (sizes.top_k + 1) * width)
    made: dict[Any, Transport] = context.state.setdefault("bench_ranks", {})
    if key not in made:
        fixed = total_bytes(_buffers(sizes, context.ranks)) if sizes.kernels == "triton" else 0
        made[key] = make_transport(sizes.transport, None, key[2], sizes.kernels, fixed)
    return made[key]
