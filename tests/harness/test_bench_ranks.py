"""The benchmark between ranks, on CPU processes: library operators by stand-ins, the arithmetic of its rows, its poison."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

import torch

from harness.bench import rank_timing
from harness.bench import ranks as bench_ranks
from harness.bench import rows as bench_rows
from harness.bench.ranks import RankSizes, Timed
from harness.bench.symmetric_ops import OPERATORS, SymmetricOps
from harness.pool import RankPool
from harness.worker import RankContext

SIZES = RankSizes(24, 32, 8, 2, torch.float32, "shared", "torch", rounds=2)


class LibraryByGloo:
    """What torch documents of its symmetric-memory operators, on CPU tensors."""

    def __getattr__(self, name: str):
        return getattr(self, f"_{name.strip('_')}")

    def _reduced(self, tensor, op, group):
        assert (op, group) == ("sum", "group")
        total = tensor.clone()
        torch.distributed.all_reduce(total)
        return total

    _one_shot_all_reduce = _reduced

    def _two_shot_all_reduce(self, tensor, op, group):
        return tensor.copy_(self._reduced(tensor, op, group))

    _multimem_all_reduce = _two_shot_all_reduce

    def _low_contention_reduce_scatter(self, tensor, op, group):
        return self._reduced(tensor, op, group).chunk(2)[torch.distributed.get_rank()]

    def _reduce_scatter_out(self, tensor, group, split_last_dim, out):
        assert tensor.dim() == out.dim() == 1 and not split_last_dim
        return out.copy_(self._low_contention_reduce_scatter(tensor, "sum", group))

    def _multimem_all_gather_out(self, tensor, group, out):
        torch.distributed.all_gather_into_tensor(out, tensor)

    def _low_contention_all_gather(self, tensor, group):
        out = tensor.new_empty(2 * len(tensor), tensor.shape[1])
        self._multimem_all_gather_out(tensor, group, out)
        return out


def with_library_task(context: RankContext, broken: str) -> list[Timed]:
    """bench_ranks as if symmetric memory were here; the operator `broken` cannot run."""
    library = LibraryByGloo()

    class Ops(SymmetricOps):
        def __init__(self, tokens, hidden, dtype, device, perm_T, place_T) -> None:
            self.buffer_TH, self.name, self.ranks = torch.empty(tokens, hidden, dtype=dtype), "group", context.ranks
            self.perm_T, self.place_T = perm_T, place_T

        def operator(self, name: str):
            return self.unable if name == broken else getattr(library, name)

        def unable(self, *arguments):
            raise RuntimeError("multicast is not set up")

    bench_ranks.missing, bench_ranks.SymmetricOps = lambda *asked: None, Ops
    return bench_ranks.bench_ranks(context, SIZES)


def test_every_library_operator_ends_with_our_tensors_and_one_that_cannot_run_is_skipped() -> None:
    with RankPool(2) as pool:
        done = pool.run(with_library_task, "multimem_all_reduce_")
    for timed in zip(*done, strict=True):
        rows = bench_rows.timed_rows(timed, SIZES, 100.0, {})
        assert all(row["correct"] for row in rows), rows
        for row in rows:
            if row["variant"] == "symm_mem.multimem_all_reduce_":
                assert row["mode"] == "skipped" and row["reason"] == "cannot run here: multicast is not set up"
            else:
                assert row["mode"] == "eager_warm" and row["ours_speedup"] > 0 and row["iterations"] == 2
    variants = {name for timed in done[0] for name in timed.error}
    assert {f"symm_mem.{name}" for name in OPERATORS} - variants == {"symm_mem.multimem_all_reduce_"}


def test_time_between_ranks_is_the_slowest_rank_of_each_round_and_no_ratio_where_one_is_wrong() -> None:
    def timed(ours: list[float], error: str | None) -> Timed:
        us = {("ours", "eager_cold"): ours} | ({} if error else {("library", "eager_cold"): [30.0, 30.0, 30.0]})
        return Timed("srs", {"ours": None, "library": error}, {}, us, {"ours": 1536, "library": 1536})

    right = [timed([10.0, 20.0, 90.0], None), timed([5.0, 40.0, 1.0], None)]
    ours, library = bench_rows.timed_rows(right, SIZES, 0.001, {})
    assert ours["p50_us"] == 40.0 and ours["mode"] == "eager_cold" and library["ours_speedup"] == 30 / 40
    assert ours["busbw_gbps"] == pytest.approx(1536 / 40.0 / 1e3)
    assert ours["link_share"] == pytest.approx(ours["busbw_gbps"] / 0.001)
    wrong = [timed([10.0], "rows differ"), timed([10.0], "rows differ")]
    ours, library = bench_rows.timed_rows(wrong, SIZES, 0.001, {})
    assert library["mode"] == "not_timed" and not library["correct"] and "ours_speedup" not in ours


def test_bytes_across_the_busiest_port_of_an_exchange() -> None:
    """Two ranks, two tokens each, served by ranks 0 and 1 of two choices."""
    serving = [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[1, 1], [1, 1]])]
    assert bench_ranks._port_rows(serving, dedup=False) == 3 and bench_ranks._port_rows(serving, dedup=True) == 2


def test_what_another_variant_left_in_a_buffer_is_no_result() -> None:
    """Negative control of the poison between ranks: `stale` returns the buffer that `ours` filled, and writes nothing."""
    buffer = torch.empty(3)
    variants = {"ours": lambda: buffer.fill_(1.0), "stale": lambda: buffer}
    case = rank_timing.RankCase("toy", variants, torch.ones(3), 1e-5, outputs=(buffer,))
    assert rank_timing._error(case, "ours") is None and rank_timing._error(case, "stale") is not None
    assert rank_timing._error(dataclasses.replace(case, outputs=()), "ours") is None
    assert rank_timing._error(dataclasses.replace(case, outputs=()), "stale") is None, "so the poison is what tells"
