"""What `gpu.py` checks and times: each case with our kernels, what they are compared with, and the bar.

All ranks are virtual: they live in one process on one device. Each shuffles on a stream of its own, as on a GPU of its own,
so that no rank's last rows keep the next one waiting; an exchange launches one rank after the other. No link speed follows
from any of these figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from semmoe.schedule.priced import priced_owners

from ..kernels.align import most_blocks
from ..kernels.grouped import MIDDLE, PREFILL, WIDE, Tiling, experts, experts_by_library, tiling_of
from ..kernels.home import home_tokens
from ..kernels.launch import launch_sag, launch_srs
from ..kernels.launch_exchange import Group, combine, pull, serve_assignments, serve_tokens, sum_own
from ..kernels.rank_tokens import rank_tokens
from ..reference.experts import experts_loop
from ..reference.ranking import TokenRanking, rank_tokens_by_sort
from ..transport.base import address_table
from .streams import side_by_side

SEED = 0


@dataclass(frozen=True)
class Sizes:
    """tokens T of the whole group, hidden H, ranks G; layers: name -> (experts, width F) at `rows` expert rows."""

    tokens: int
    hidden: int
    ranks: int
    rows: int
    top_k: int
    layers: dict[str, tuple[int, int]]
    blocks: tuple[int, ...]
    dtype: torch.dtype
    device: str


FULL_LAYERS = {"qwen3-30b-a3b": (128, 768), "deepseek-v2-lite": (64, 1408)}
FULL = Sizes(4096, 2048, 8, 8192, 8, FULL_LAYERS, (16, 64, 132, 528), torch.bfloat16, "cuda")
DRY = Sizes(24, 32, 4, 40, 2, {"toy": (4, 16)}, (3,), torch.float32, "cpu")


@dataclass(frozen=True)
class Bar:
    """What the project asks for: the `share` of the copy bandwidth, or the `speedup` over the named baseline."""

    kind: str
    value: float
    baseline: str = ""


@dataclass(frozen=True)
class Case:
    """variants: name -> what is timed, returning its results. expected: the results, within `tolerance` (relative, and
    absolute where `tolerance` > 0). outputs: buffers filled with NaN before every check; unused: rows of them that must
    still be NaN after it. moved_bytes: read from and written to memory, what ranks read alike once. uncapturable: variant ->
    why no graph can hold it."""

    name: str
    variants: dict[str, Callable[[], Sequence[Tensor]]]
    expected: Sequence[Tensor]
    tolerance: float = 0.0
    outputs: Sequence[Tensor] = field(default_factory=tuple)
    moved_bytes: int = 0
    bar: Bar | None = None
    unused: Sequence[Tensor] = field(default_factory=tuple)
    uncapturable: dict[str, str] = field(default_factory=dict)

    def check(self, name: str) -> None:
        """AssertionError when a variant's results are not those expected."""
        for tensor in self.outputs:
            tensor.fill_(torch.nan)
        self.verify(name, self.variants[name]())
        for rows in self.unused:
            assert rows.isnan().all(), f"{name}: wrote into rows that nobody uses"

    def verify(self, name: str, results: Sequence[Tensor]) -> None:
        for got, wanted in zip(results, self.expected, strict=True):
            torch.testing.assert_close(
                got, wanted.to(got.dtype), rtol=self.tolerance, atol=self.tolerance, msg=lambda m: f"{name}: {m}"
            )


def makers(sizes: Sizes) -> dict[str, Callable[[], Iterable[Case]]]:
    """By name, each with its own seed; called one after the other, so that one's buffers are freed before the next one's are
    made."""

    def seeded(make: Callable[..., Iterable[Case]], *arguments: Any) -> Callable[[], Iterable[Case]]:
        def made() -> Iterable[Case]:
            torch.manual_seed(SEED)
            return make(sizes, *arguments)

        return made

    return {
        "shuffle": seeded(shuffle_cases),
        "rank_tokens": seeded(lambda *known: [ranking_case(*known)]),
        "assign_homes": seeded(lambda *known: [home_case(*known)]),
        **{f"experts_{name}": seeded(lambda *known: [experts_case(*known)], name) for name in sizes.layers},
        "exchange_dedup": seeded(lambda *known: [exchange_case(*known)], True),
        "exchange_assignment": seeded(lambda *known: [exchange_case(*known)], False),
    }


def shuffle_cases(sizes: Sizes) -> Iterator[Case]:
    """SRS and SAG of all ranks; skewed counts, as a scheduler leaves them."""
    tokens, hidden, ranks = sizes.tokens, sizes.hidden, sizes.ranks
    plan = rank_tokens_by_sort(_homes(sizes), ranks)
    counts, starts = plan.counts_on_device_G.tolist(), plan.starts_on_device_G.tolist()
    x_GTH = torch.randn(ranks, tokens, hidden, dtype=sizes.dtype, device=sizes.device)
    table, row_bytes = address_table(list(x_GTH)), hidden * x_GTH.element_size()
    out_G = [x_GTH.new_empty(tokens, hidden) for _ in range(ranks)]
    sums_TH = _rank_order_sum(x_GTH)

    def srs(blocks: int) -> list[Tensor]:
        def of(rank: int) -> Tensor:
            return launch_srs(table, x_GTH[0], plan, rank, out_NH=out_G[rank], blocks=blocks)[0][: counts[rank]]

        return side_by_side([partial(of, rank) for rank in range(ranks)], sizes.device)

    def index_reduce_scatter() -> list[Tensor]:
        shuffled_TH = _rank_order_sum(x_GTH.index_select(1, plan.perm_T))
        return [shuffled_TH[start : start + count] for start, count in zip(starts, counts, strict=True)]

    variants: dict[str, Callable[[], Sequence[Tensor]]] = {f"blocks={b}": partial(srs, b) for b in sizes.blocks}
    expected = [sums_TH[plan.perm_T[s : s + n]] for s, n in zip(starts, counts, strict=True)]
    moved = (ranks + 1) * tokens * row_bytes
    tolerance = 2**-7 if sizes.dtype == torch.bfloat16 else 0.0
    variants["index_reduce_scatter"] = index_reduce_scatter
    unused = [out[count:] for out, count in zip(out_G, counts, strict=True)]
    yield Case("srs", variants, expected, tolerance, out_G, moved, Bar("share", 0.8), unused)

    z_G = [rows.contiguous() for rows in expected]
    z_table = address_table(z_G)

    def sag(blocks: int) -> list[Tensor]:
        def to(rank: int) -> Tensor:
            return launch_sag(z_table, z_G[0], plan, rank, out_G[rank], blocks=blocks)[0]

        return side_by_side([partial(to, rank) for rank in range(len(z_G))], sizes.device)

    def all_gather_index() -> list[Tensor]:
        place_T = plan.starts_on_device_G[plan.owner_T] + plan.slot_T
        return [torch.cat(z_G).index_select(0, place_T) for _ in range(ranks)]

    variants = {f"blocks={b}": partial(sag, b) for b in sizes.blocks} | {"all_gather_index": all_gather_index}
    moved = (1 + ranks) * tokens * row_bytes  # all ranks read the same rows, from the cache all but once
    yield Case("sag", variants, [sums_TH] * ranks, 0.0, out_G, moved, Bar("share", 0.8))


def ranking_case(sizes: Sizes) -> Case:
    owner_T = _homes(sizes)

    def fields(plan: TokenRanking) -> list[Tensor]:
        return [plan.perm_T, plan.slot_T, plan.counts_on_device_G, plan.starts_on_device_G]

    variants: dict[str, Callable[[], Sequence[Tensor]]] = {
        "kernel": lambda: fields(rank_tokens(owner_T, sizes.ranks)),
        "torch": lambda: fields(rank_tokens_by_sort(owner_T, sizes.ranks)),
    }
    expected = fields(rank_tokens_by_sort(owner_T, sizes.ranks))
    return Case("rank_tokens", variants, expected, bar=Bar("speedup", 1.25, "torch"))


def home_case(sizes: Sizes) -> Case:
    score_TG = torch.randint(0, 1 << 18, (sizes.tokens, sizes.ranks), dtype=torch.int32, device=sizes.device)
    capacity = -(-sizes.tokens // sizes.ranks)
    expected = torch.from_numpy(priced_owners(score_TG.cpu().numpy(), capacity)).to(sizes.device)
    return Case("assign_homes", {"kernel": lambda: [home_tokens(score_TG, capacity)]}, [expected])


def experts_case(sizes: Sizes, layer: str) -> Case:
    """SwiGLU experts of a whole layer, from rows in order of arrival to rows in order of arrival."""
    count, width = sizes.layers[layer]
    x_AH = torch.randn(sizes.rows, sizes.hidden, dtype=sizes.dtype, device=sizes.device)
    slot_A = torch.randint(0, count, (sizes.rows,), device=sizes.device)
    w13, w2 = _weights(sizes, count, width)
    order_A = slot_A.argsort(stable=True)
    counts = torch.bincount(slot_A, minlength=count).tolist()
    expected = torch.empty(sizes.rows, sizes.hidden, device=sizes.device)
    expected[order_A] = experts_loop(x_AH[order_A].float(), counts, w13.float(), w2.float())

    def kernel(tiling: Tiling | None) -> list[Tensor]:
        return [experts(x_AH, None, slot_A, w13, w2, tiling)]

    own = None if sizes.device == "cuda" else Tiling(16, 32, 32, 4, 2)
    variants: dict[str, Callable[[], Sequence[Tensor]]] = {"kernel": partial(kernel, own)}
    if sizes.device == "cuda":  # for whoever sets `tiling_of`
        variants |= {f"kernel {t.block_m}x{t.block_n}": partial(kernel, t) for t in (WIDE, PREFILL, MIDDLE)}
    variants["grouped_mm"] = lambda: [experts_by_library(x_AH, None, slot_A, w13, w2)]
    reads = {} if _grouped_on_device(sizes) else {"grouped_mm": "F.grouped_mm reads sizes on the host on this GPU"}
    tolerance, bar = 2e-2 if sizes.dtype == torch.bfloat16 else 1e-4, Bar("speedup", 1.0, "grouped_mm")
    return Case(f"experts_{layer}", variants, [expected], tolerance, bar=bar, uncapturable=reads)


def _grouped_on_device(sizes: Sizes) -> bool:
    """torch has a grouped product of bf16 without host reads for Hopper and Blackwell (sm_90, sm_100)."""
    if sizes.device != "cuda":
        return False
    return not torch.version.hip and torch.cuda.get_device_capability()[0] in (9, 10)


def exchange_case(sizes: Sizes, dedup: bool) -> Case:
    """Dispatch, answers and combine of all ranks, as a layer makes them (harness/device/pulled.py); an expert here is the
    identity, so that rows alone count."""
    ranks, tokens, hidden = sizes.ranks, sizes.tokens, sizes.hidden
    experts_all = next(iter(sizes.layers.values()))[0]
    per_rank = experts_all // ranks
    plan = rank_tokens_by_sort(_homes(sizes), ranks)
    counts, starts = plan.counts_on_device_G.tolist(), plan.starts_on_device_G.tolist()
    made = torch.rand(tokens, experts_all, device=sizes.device).argsort(1)[:, : sizes.top_k]
    weights_Tk = torch.rand(tokens, sizes.top_k, device=sizes.device)
    group = Group(plan, made.to(torch.int32).contiguous(), weights_Tk, per_rank, ranks)
    x_TH = torch.randn(tokens, hidden, dtype=sizes.dtype, device=sizes.device)
    mine_G = [plan.perm_T[s : s + n] for s, n in zip(starts, counts, strict=True)]
    x_G = [x_TH[mine].contiguous() for mine in mine_G]
    entries = tokens if dedup else tokens * sizes.top_k
    block_m = tiling_of(tokens * sizes.top_k, experts_all, x_TH.device).block_m
    most_rows = tokens if dedup else most_blocks(entries, per_rank, block_m) * block_m
    out_G = [x_TH.new_empty(tokens, hidden) for _ in range(ranks)]
    o_G = [x_TH.new_empty(entries, hidden) for _ in range(ranks)]
    rows_G = [x_TH.new_empty(most_rows, hidden) for _ in range(ranks)]
    x_table, o_table = address_table(x_G), address_table(o_G)

    def run(blocks: int) -> list[Tensor]:
        for rank in range(len(x_G)):  # keeps X alive, which the table holds as addresses only
            served = serve_tokens(group, rank) if dedup else serve_assignments(group, rank, block_m)
            pull(x_table, group, served, rank, rows_G[rank], blocks=blocks)
            if served.row_T is None:
                o_G[rank].copy_(rows_G[rank][served.place_A()])
                continue
            answers_AH = rows_G[rank][served.row_T.repeat_interleave(sizes.top_k, output_size=tokens * sizes.top_k)]
            sum_own(answers_AH, group, served, rank, o_G[rank], blocks)
        for rank in range(ranks):
            combine(o_table, group, rank, out_G[rank], dedup, blocks=blocks)
        return [out[:n] for out, n in zip(out_G, counts, strict=True)]

    sent_GG = _assignment_pairs(group, counts)

    def index_all_to_all() -> list[Tensor]:
        """A row per assignment, sorted by serving rank, all-to-all, and back: copies on virtual ranks. The sizes, which a
        library's call needs on the host, are known beforehand and cost nothing here."""
        order_G, sent_G = [], []
        for start, count, x_nH, sizes_G in zip(starts, counts, x_G, sent_GG, strict=True):
            order_A = group.slots_Tk[plan.perm_T[start : start + count]].view(-1).argsort(stable=True)
            order_G.append(order_A)
            sent_G.append(x_nH.index_select(0, order_A // sizes.top_k).split(sizes_G))
        served_G = [torch.cat(parts) for parts in zip(*sent_G, strict=True)]
        split_G = [rows.split(list(came)) for rows, came in zip(served_G, zip(*sent_GG, strict=True), strict=True)]
        outs = []
        for rank, (order_A, mine_n) in enumerate(zip(order_G, mine_G, strict=True)):
            answers_AH = torch.cat([parts[rank] for parts in split_G]).float()
            answers_AH = answers_AH * weights_Tk[mine_n].view(-1)[order_A][:, None]
            total_nH = torch.zeros(len(mine_n), hidden, device=x_TH.device)
            outs.append(total_nH.index_add_(0, order_A // sizes.top_k, answers_AH).to(sizes.dtype))
        return outs

    total_TH = x_TH.float() * weights_Tk.sum(dim=1, keepdim=True)
    tolerance = 3e-2 if sizes.dtype == torch.bfloat16 else 1e-5
    variants: dict[str, Callable[[], Sequence[Tensor]]] = {f"blocks={b}": partial(run, b) for b in sizes.blocks}
    variants["index_all_to_all"] = index_all_to_all
    name = "exchange_dedup" if dedup else "exchange_assignment"
    unused = [out[count:] for out, count in zip(out_G, counts, strict=True)]
    outputs = [*o_G, *out_G, *rows_G]
    return Case(name, variants, [total_TH[mine] for mine in mine_G], tolerance, outputs, unused=unused)


def _assignment_pairs(group: Group, counts_G: list[int]) -> list[list[int]]:
    """Assignments [home rank][serving rank]."""
    serving_Tk = (group.slots_Tk // group.slots_per_rank)[group.plan.perm_T]
    return [torch.bincount(part.reshape(-1), minlength=group.ranks).tolist() for part in serving_Tk.split(counts_G)]


def _homes(sizes: Sizes) -> Tensor:
    """A home per token, later ranks liked up to twice as much."""
    share_G = torch.linspace(1, 2, sizes.ranks)
    return torch.multinomial(share_G, sizes.tokens, replacement=True).to(sizes.device)


def _weights(sizes: Sizes, count: int, width: int) -> tuple[Tensor, Tensor]:
    w13 = torch.randn(count, 2 * width, sizes.hidden, dtype=sizes.dtype, device=sizes.device) / sizes.hidden**0.5
    return w13, torch.randn(count, sizes.hidden, width, dtype=sizes.dtype, device=sizes.device) / width**0.5


def _rank_order_sum(x_GTH: Tensor) -> Tensor:
    total_TH = torch.zeros(x_GTH.shape[1:], dtype=torch.float32, device=x_GTH.device)
    for x_TH in x_GTH:
        total_TH += x_TH
    return total_TH.to(x_GTH.dtype)
