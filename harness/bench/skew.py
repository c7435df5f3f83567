"""Skewed all-to-all exchanges, timed: by total bytes, pattern and how far the pattern goes. Nobody has published such a table.

    python -m harness.bench.skew            make skew: 2 and 4 CPU ranks, or all GPUs of the machine; results/skew.md

One exchange is the library's all-to-all (gloo between CPU processes, NCCL between GPUs) of rows to other ranks; exchanges.py
says which.

Every case is checked first, what arrives poisoned before, and nothing is timed when one is wrong. Then all cases are called in
turn, in an order that is new every round and the same on all ranks; the slowest rank of each call counts, medians are fitted.
Raw samples lie beside the page (.samples.jsonl), from which `--from` makes it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.files import write_atomically
from semmoe.rows import commit

from ..device.clock import devices_meet, together_us
from ..environment import environment, gpu_libraries, gpu_state
from ..pool import RankPool
from ..record import no_collection
from ..transport.choose import rank_device
from ..worker import RankContext
from .exchanges import ROW_BYTES, Exchange, exchanges
from .skew_page import document, read_samples

KIB = 1 << 10
SIZES = {
    "cpu": tuple(KIB << p for p in (6, 8, 10, 12, 14)),
    "cuda": tuple(KIB << p for p in (8, 10, 12, 14, 16, 18, 20)),
}
WARM_UPS = 2


def time_exchanges(context: RankContext, cases: Sequence[Exchange], rounds: int) -> NDArray[np.float64]:
    """Task of every rank: [cases, rounds] microseconds on this rank. UserError where rows arrive wrong."""
    device = rank_device("collective", context.ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meet = devices_meet(device)
    calls = [_call(context, case, device) for case in cases]
    us = np.zeros((len(cases), rounds))
    with no_collection():
        for turn in range(-WARM_UPS, rounds):
            for i in np.random.default_rng(WARM_UPS + turn).permutation(len(cases)):
                took_us = together_us(calls[i], device, meet)
                if turn >= 0:
                    us[i, turn] = took_us
            context.progress(turn + WARM_UPS + 1, rounds + WARM_UPS)
    return us


def _call(context: RankContext, case: Exchange, device: torch.device) -> Callable[[], Any]:
    """A call of the exchange on this rank, after one that was checked."""
    rows_GG = case.rows_GG(context.ranks)
    send_G, receive_G = rows_GG[context.rank].tolist(), rows_GG[:, context.rank].tolist()
    sent_NF = _random_rows(context.rank, sum(send_G)).to(device)
    got_NF = torch.full((sum(receive_G), ROW_BYTES // 4), torch.nan, device=device)

    def call() -> None:
        dist.all_to_all_single(got_NF, sent_NF, receive_G, send_G)

    call()
    starts_GG = rows_GG.cumsum(axis=1) - rows_GG
    parts = [
        _random_rows(source, int(rows_GG[source].sum()))[starts_GG[source, context.rank] :][:count]
        for source, count in enumerate(receive_G)
    ]
    wrong = torch.tensor([not torch.equal(got_NF.cpu(), torch.cat(parts))], dtype=torch.int64)
    dist.all_reduce(wrong)
    if wrong.item():
        raise UserError(f"{case}: {int(wrong.item())} ranks received other rows than were sent, so nothing was timed")
    return call


def _random_rows(rank: int, count: int) -> Tensor:
    """What a rank sends: every rank can make it."""
    return torch.randn(count, ROW_BYTES // 4, generator=torch.Generator().manual_seed(rank))


def measure(ranks: int, rounds: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """A sample line of every case: what it is, and microseconds of the slowest rank by round. The first one has the
    environment of all."""
    cases, on_gpu = exchanges(sizes, ranks), torch.cuda.is_available()
    about = environment(ranks, "GPUs" if on_gpu else "CPU processes") | {"commit": commit(), "row_bytes": ROW_BYTES}
    before = gpu_state() if on_gpu else []
    with RankPool(ranks, timeout_s=300.0) as pool:
        us_GCN = np.array(pool.run(time_exchanges, cases, rounds))
    if on_gpu:
        about |= gpu_libraries() | {"gpu_state_before": before, "gpu_state_after": gpu_state()}
    lines = [
        {"ranks": ranks, **asdict(case), "us": us_N.round(1).tolist()}
        for case, us_N in zip(cases, us_GCN.max(axis=0), strict=True)
    ]
    lines[0]["environment"] = about
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.skew",
        description="Time skewed all-to-all exchanges and write the page about them.",
    )
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted({2, gpus}) if gpus > 1 else [2, 4])
    parser.add_argument("--rounds", type=int, default=30, help="calls of every case (default 30)")
    parser.add_argument("--out", type=Path, default=Path("results/skew.md"))
    parser.add_argument(
        "--from", dest="samples", type=Path, help="make the page from these raw samples, measure nothing"
    )
    chosen = parser.parse_args(argv)
    if min(chosen.ranks) < 2 or chosen.rounds < 2:
        parser.error("at least 2 ranks and 2 rounds are needed")
    if 1 <= gpus < max(chosen.ranks) and not chosen.samples:
        parser.error(f"{max(chosen.ranks)} ranks for {gpus} GPUs: a GPU each, or none at all (CUDA_VISIBLE_DEVICES=)")
    try:
        if chosen.samples:
            lines = read_samples(chosen.samples)
        else:
            sizes = SIZES["cuda" if gpus else "cpu"]
            lines = [line for ranks in chosen.ranks for line in measure(ranks, chosen.rounds, sizes)]
            raw = "".join(json.dumps(line) + "\n" for line in lines)
            write_atomically(chosen.out.with_suffix(".samples.jsonl"), raw)
        write_atomically(chosen.out, document(lines, "make skew"))
    except UserError as error:
        print(f"skew: {error}", file=sys.stderr)
        return 2
    print(f"written: {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
