"""Where a placement must change nothing: exchanges that are blind to it, and messages that are all floor.

Qwen3-30B-A3B on h100x8, synthetic routes with planted locality, fixed batches in attention-DP. Communication is dispatch
plus combine of a layer. Under all-gather the request scheduler is the same for all: it decides how many tokens a rank
has, which all-gather does see. A placement may still move expert time (imbalance, active experts), which is shown apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semmoe.builder import RunBuilder
from semmoe.config import compose_all

from .row import Row

SMALL_US = 5.0  # scatter of a collective under 1 MiB from one NCCL version to the next (NCCL tables, half either way)
PLACEMENTS = tuple((name, "round_robin") for name in ("contiguous", "random", "eplb", "semantic"))
WITH_SCHEDULER = (*PLACEMENTS, ("semantic", "semantic"))  # requests sent to where their experts are, too
COMMON = (
    "model=qwen3-30b-a3b",
    "cluster=h100x8",
    "trace=synthetic",
    "trace.requests=48",
    "trace.prompt_len=64",
    "trace.output_len=32",
    "flow=dp",
    "workload=batches",
    "planned_folds=0",
    "time_limit_s=5",
)


@dataclass(frozen=True)
class Point:
    """A layer's mean times under one policy, microseconds."""

    policy: str
    lar: float
    communication_us: float
    experts_us: float


def points(dispatcher: str, tokens_a_rank: int, policies: tuple[tuple[str, str], ...]) -> list[Point]:
    """Every policy on the same batches; the first is what the others are compared with."""
    from ..app import simulate

    builder, found = RunBuilder(), []
    for placement, scheduler in policies:
        overrides = [
            *COMMON,
            f"dispatcher={dispatcher}",
            f"placement={placement}",
            f"request_scheduler={scheduler}",
            f"workload.batch_tokens={8 * tokens_a_rank}",
            "workload.max_batches=6",
        ]
        (config,) = compose_all(overrides)
        row: dict[str, Any] = simulate(builder.build(config))
        communication = 1e3 * (row["dispatch_ms"] + row["combine_ms"])
        found.append(Point(f"{placement} + {scheduler}", row["lar_replayed"], communication, 1e3 * row["experts_ms"]))
    return found


def null_rows() -> list[Row]:
    """The two null results; see the module."""
    rows = []
    blind = points("allgather_rs", 512, PLACEMENTS)
    change = max(abs(p.communication_us - blind[0].communication_us) for p in blind[1:])
    what = "null: allgather_rs, communication, any placement, us"
    rows.append(Row("null.allgather_rs", what, {"change": change}, {"change": 0.0}, len(blind) - 1, told(blind)))
    small = points("a2a_dedup", 16, WITH_SCHEDULER)
    change = max(abs(p.communication_us - small[0].communication_us) for p in small[1:])
    band = 2 * SMALL_US
    verdict = "not distinguishable" if change <= band else "distinguishable"
    what = f"null: a2a_dedup, 16 tokens a rank, communication, us ({verdict})"
    note = f"curve's own uncertainty: {SMALL_US:g} us for each of dispatch and combine under 1 MiB; " + told(small)
    rows.append(Row("null.decode", what, {"change": change}, {"change": band}, len(small) - 1, note))
    return rows


def told(found: list[Point]) -> str:
    return "; ".join(
        f"{p.policy}: LAR {p.lar:.2f}, communication {p.communication_us:.1f} us, experts {p.experts_us:.1f} us"
        for p in found
    )
