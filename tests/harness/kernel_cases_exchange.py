"""Bodies of the tests of dispatch and combine by pulls: virtual ranks in the interpreter, and two processes."""

from __future__ import annotations

import contextlib
import time

import torch
from torch import Tensor

from harness.reference import exchange, ranking
from harness.reference.experts import moe_reference
from harness.transport.base import address_table

HIDDEN, WIDTH, K = 48, 32, 3


def step(owner_T: Tensor, ranks: int, slots_per_rank: int, seed: int = 0) -> tuple[object, list[Tensor], Tensor]:
    """(group, X_r of every rank, x in original order); distinct slots a token, weights that do not sum to one."""
    from harness.kernels.launch_exchange import Group

    made = torch.Generator().manual_seed(seed)
    plan, tokens = ranking.rank_tokens_by_sort(owner_T, ranks), len(owner_T)
    slots_Tk = torch.rand(tokens, ranks * slots_per_rank, generator=made).argsort(1)[:, :K].to(torch.int32).contiguous()
    weights_Tk, x_TH = torch.rand(tokens, K, generator=made), torch.randn(tokens, HIDDEN, generator=made)
    starts, counts = plan.starts_on_device_G.tolist(), plan.counts_on_device_G.tolist()
    x_G = [x_TH[plan.perm_T[s : s + n]].contiguous() for s, n in zip(starts, counts, strict=True)]
    return Group(plan, slots_Tk, weights_Tk, slots_per_rank, ranks), x_G, x_TH


def weights(slots: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    w13 = torch.randn(slots, 2 * WIDTH, HIDDEN, generator=made) / 7
    return w13, torch.randn(slots, HIDDEN, WIDTH, generator=made) / 6


def serve(group, x_table, rank: int, dedup: bool, w13: Tensor, w2: Tensor, out: Tensor, barrier=None) -> list[int]:
    """Pull, experts, answers of one rank into `out` ([T, H] dedup, else [A, H]); rows pulled."""
    from harness.kernels.grouped import Tiling, experts, grouped_matmul
    from harness.kernels.launch_exchange import pull, serve_assignments, serve_tokens, sum_own

    tiling, assignments = Tiling(16, 64, 64, 4, 2), group.slots_Tk.numel()
    mine = slice(rank * group.slots_per_rank, (rank + 1) * group.slots_per_rank)
    served = serve_tokens(group, rank) if dedup else serve_assignments(group, rank, tiling.block_m)
    rows = torch.full((len(served.list_P), HIDDEN), torch.nan)
    pulled_BG = pull(x_table, group, served, rank, rows, barrier, blocks=2)
    if dedup:
        own = torch.full((assignments, HIDDEN), torch.nan)
        row_A = served.row_T.repeat_interleave(K)
        experts(rows, row_A, group.own_slot_A(rank), w13[mine], w2[mine], tiling, own)
        sum_own(own, group, served, rank, out, blocks=2)
        slots = (group.slots_Tk, group.weights_Tk, group.slots_per_rank)
        assert torch.equal(out.nan_to_num(), exchange.sum_own(own.nan_to_num(), *slots, rank))
    else:
        hidden = torch.empty(assignments, WIDTH)
        place_A = torch.zeros(assignments, dtype=torch.int64)
        used = served.list_P[: int(served.limit_1) * tiling.block_m].long()
        real = used < assignments
        place_A[used[real]] = torch.arange(len(used))[real]
        grouped_matmul(rows, place_A, w13[mine], served.alignment, True, tiling, hidden)
        grouped_matmul(hidden, None, w2[mine], served.alignment, False, tiling, out)
        assert rows[: len(used)][~real].isnan().all()
    return pulled_BG.sum(0).tolist()


def check_virtual(counts: list[int], dedup: bool) -> None:
    """Whole exchange with real experts on virtual ranks: equal to one process with all experts, rows as the twin says."""
    from harness.kernels.launch_exchange import combine

    ranks, per_rank = len(counts), max(2, 4 // len(counts))
    tokens = sum(counts)
    owner_T = torch.repeat_interleave(torch.arange(ranks), torch.tensor(counts))
    owner_T = owner_T[torch.randperm(tokens, generator=torch.Generator().manual_seed(1))]
    group, x_G, x_TH = step(owner_T, ranks, per_rank)
    w13, w2 = weights(ranks * per_rank)
    expected_TH = moe_reference(x_TH, group.slots_Tk.long(), group.weights_Tk, w13, w2)
    o_G = [torch.full((tokens if dedup else tokens * K, HIDDEN), torch.nan) for _ in range(ranks)]
    here_TG = torch.stack([(group.slots_Tk // per_rank == r).sum(1) for r in range(ranks)], dim=1)
    here_TG = here_TG.clamp(max=1) if dedup else here_TG
    for rank in range(ranks):
        pulled_G = serve(group, address_table(x_G), rank, dedup, w13, w2, o_G[rank])
        assert pulled_G == [int(here_TG[owner_T == home, rank].sum()) for home in range(ranks)]
        served_T = here_TG[:, rank].repeat_interleave(1 if dedup else K) > 0
        assert o_G[rank][~served_T].isnan().all()
    for rank in range(ranks):
        out = torch.full((tokens, HIDDEN), torch.nan)
        pulled_BG = combine(address_table(o_G), group, rank, out, dedup, blocks=2)
        mine_n = group.plan.perm_T[group.plan.owner_T[group.plan.perm_T] == rank]
        twin, pulled_by_twin_G = exchange.combine(o_G, mine_n, group.slots_Tk, group.weights_Tk, per_rank, dedup)
        assert torch.equal(out[: counts[rank]], twin) and pulled_BG.sum(0).tolist() == pulled_by_twin_G
        torch.testing.assert_close(out[: counts[rank]], expected_TH[mine_n], rtol=1e-4, atol=1e-5)
        assert out[counts[rank] :].isnan().all()


def check_pull_twin() -> None:
    from harness.kernels.launch_exchange import pull, serve_tokens

    group, x_G, x_TH = step(torch.tensor([1, 0, 0, 1, 1, 0, 1]), 2, 2)
    served = serve_tokens(group, 1)
    here = served.list_P[: int(served.limit_1[0])]
    rows = torch.full((7, HIDDEN), torch.nan)
    pulled_BG = pull(address_table(x_G), group, served, 1, rows, blocks=1)
    expected, pulled_by_twin_G = exchange.pull(x_G, group.plan, here)
    assert torch.equal(rows[: len(here)], expected) and torch.equal(expected, x_TH[here])
    assert pulled_BG.sum(0).tolist() == pulled_by_twin_G and rows[len(here) :].isnan().all()


def rounds(number: int, dedup: bool, synced: bool) -> int:
    """Two processes over shared memory, other values each round, ranks late by turns; rounds that were wrong."""
    from rank_processes import transport_of

    from harness.kernels.launch import make_barrier
    from harness.kernels.launch_exchange import combine

    transport = transport_of("shared", 2)
    if transport is None:
        return 0
    rank, tokens, wrong = transport.rank, 5, 0
    x = transport.alloc(tokens, HIDDEN, torch.float32)
    o = transport.alloc(tokens if dedup else tokens * K, HIDDEN, torch.float32)
    state = make_barrier(transport, blocks=2, spin_limit=200_000) if synced else None
    w13, w2 = weights(4)
    for index in range(number):
        owner_T = torch.randint(0, 2, (tokens,), generator=torch.Generator().manual_seed(index))
        group, x_G, x_TH = step(owner_T, 2, 2, seed=index)
        time.sleep(0.1 * (rank == index % 2))
        x.local[: len(x_G[rank])] = x_G[rank]
        serve_quietly = serve if synced else _serve_anything
        serve_quietly(group, x.table_G, rank, dedup, w13, w2, o.local, state)
        time.sleep(0.05 * (rank != index % 2))
        out = torch.empty(tokens, HIDDEN)
        combine(o.table_G, group, rank, out, dedup, state)
        mine_n = group.plan.perm_T[group.plan.owner_T[group.plan.perm_T] == rank]
        expected = moe_reference(x_TH, group.slots_Tk.long(), group.weights_Tk, w13, w2)[mine_n]
        wrong += not torch.allclose(out[: len(mine_n)], expected, rtol=1e-4, atol=1e-5)
        if state is not None:
            state.check()
    transport.barrier()
    return wrong


def _serve_anything(*arguments) -> None:
    with contextlib.suppress(AssertionError):  # stale rows may be NaN where the twin compares; the sums are counted
        serve(*arguments)


def check_bench_device(ranks: int) -> list[str]:
    """What `bench_ranks` times of ours between GPUs: right twice in a row, without a host read, in any order of cases."""
    from host_reads import no_host_reads
    from rank_processes import transport_of

    from harness.bench.ranks import RankSizes, cases_of

    transport = transport_of("shared_fused", ranks)
    if transport is None:
        return []
    sizes = RankSizes(24, 32, 8, 2, torch.float32, "shared", "triton", rounds=0)
    done = []
    for case in 2 * cases_of(sizes, transport, torch.device("cpu")):
        for name in [name for name in case.variants if name.startswith("ours")]:
            with no_host_reads():
                result = case.variants[name]()
            torch.testing.assert_close(result, case.expected, rtol=1e-5, atol=1e-5)
            done.append(f"{case.name} {name}")
    return done
