"""What else a user can pull besides placement: each lever's layer against one copy per assignment without policies."""

from __future__ import annotations

from typing import Any

from semmoe.run import Run

from .desk import Desk, Layer, option
from .judge import Cell


def levers(
    desk: Desk, phase: str, tokens: int, known: dict[Any, Layer], co_scheduled: Cell
) -> list[tuple[str, float, str]]:
    """(lever, percent of a layer against one copy per assignment without policies, note), the largest first."""
    plain = known[("dp", "a2a_assignment"), tokens]
    run = desk.run("dp", "a2a_dedup")
    dedup = known[("dp", "a2a_dedup"), tokens]
    slots = run.model.num_experts + run.ep_size
    replicas = desk.layer(desk.run("dp", "a2a_dedup", placement=option("placement", "eplb") | {"slots": slots}), tokens)
    fp8 = desk.layer(desk.run("dp", option("dispatcher", "a2a_dedup") | {"dispatch_dtype": "fp8"}), tokens)
    hidden = min(dedup.exchange_ms, dedup.ms - dedup.exchange_ms)
    dense = known[("dp", "allgather_rs"), tokens]
    rows = [
        ("de-duplicating dispatch (a2a_dedup)", dedup.ms, "one copy per rank; the engine's dispatcher decides"),
        ("all-gather and reduce-scatter", dense.ms, "no placement needed; bytes grow with ranks"),
        (f"replication (EPLB, {slots} slots) + a2a_dedup", replicas.ms, f"{_gib(run, slots):.1f} GiB more a rank"),
        ("fp8 dispatch + a2a_dedup", fp8.ms, "half the bytes outward; check quality"),
        ("two-batch overlap + a2a_dedup, at best", dedup.ms - hidden, "an upper bound: all that can hide is hidden"),
    ]
    rows.append((f"co-scheduling ({co_scheduled.dispatcher})", co_scheduled.ours_ms, "this advice"))
    ranked = [(name, 100 * (1 - ms / plain.ms), f"{phase}; {note}") for name, ms, note in rows]
    return sorted(ranked, key=lambda row: -row[1])


def _gib(run: Run, slots: int) -> float:
    more = (slots - run.model.num_experts) / run.ep_size
    return more * run.model.num_moe_layers * run.model.expert_bytes / 2**30
