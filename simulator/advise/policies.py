"""Which policies are best: a short ladder of them, tried where co-scheduling looks best, from nothing to everything.

    no policies -> EPLB's balance -> semantic placement alone -> semantic placement and scheduling

Placement alone keeps requests in turn (attention-DP) and tokens in order (tp_scattered: no shuffle). Placements are those
of the co-scheduled runs, so a rung costs little more than pricing its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .desk import Desk, Layer
from .judge import TIE_PCT, Cell, baselines, co_scheduled, gain_interval

NONE, BALANCE, ALONE = "no policies", "EPLB's balance", "semantic placement alone"
BOTH = "semantic placement and scheduling"


@dataclass(frozen=True)
class Tried:
    """One policy set in one cell: its layer, and what it gains over the better baseline. Gains in percent."""

    policy: str
    flow: str
    dispatcher: str
    phase: str
    tokens_a_rank: int
    layer_ms: float
    gain_pct: float
    low_pct: float
    high_pct: float
    lar: float
    imbalance: float


def best_looking(cells: Sequence[Cell]) -> list[Cell]:
    """Of every step and flow the cell where co-scheduling gains most."""
    best: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        key = cell.phase, cell.flow
        if key not in best or cell.gain_pct > best[key].gain_pct:
            best[key] = cell
    return list(best.values())


def try_policies(desk: Desk, cell: Cell, known: dict[Any, Layer]) -> list[Tried]:
    """Every rung of the ladder in a cell, fastest first."""
    flow, dispatcher, tokens = cell.flow, cell.dispatcher, cell.tokens_a_rank
    base = min(baselines(desk, flow, cell.phase, tokens, known), key=lambda layer: layer.ms)
    base_flow, base_dispatcher = base.name.split()
    rows = [
        Tried(NONE, base_flow, base_dispatcher, cell.phase, tokens, base.ms, 0.0, 0.0, 0.0, base.lar, base.imbalance)
    ]
    plain = "dp" if flow == "dp" else "tp_scattered"
    for placement, policy in (("eplb", BALANCE), ("semantic", ALONE)):
        run = desk.placed(flow, dispatcher, placement)
        layer = desk.layer(run, tokens)
        rows.append(_tried(policy, plain, cell, layer, base, run))
    run, layer = co_scheduled(desk, flow, dispatcher, tokens, known)
    rows.append(_tried(BOTH, flow, cell, layer, base, run))
    return sorted(rows, key=lambda row: row.layer_ms)


def _tried(policy: str, flow: str, cell: Cell, layer: Layer, base: Layer, run: Any) -> Tried:
    gain = 100 * (1 - layer.ms / base.ms)
    low, high = gain_interval(layer, base, run)
    return Tried(policy, flow, cell.dispatcher, cell.phase, cell.tokens_a_rank, layer.ms, gain, low, high, layer.lar,
                 layer.imbalance)  # fmt: skip


def best_said(tried: Iterable[Tried]) -> str:
    """In words: which policies are best in every step, and by how much over the next."""
    by_phase: dict[str, list[Tried]] = {}
    for row in tried:
        by_phase.setdefault(row.phase, []).append(row)
    said = []
    for phase, rows in by_phase.items():
        best, *others = sorted(rows, key=lambda row: row.layer_ms)
        text = f"{phase}: {best.policy} ({best.flow}, {best.dispatcher})"
        if best.policy != NONE:
            text += f", {best.gain_pct:+.1f} % over the better baseline ({best.low_pct:+.1f} to {best.high_pct:+.1f})"
        following = next((row for row in others if row.policy != best.policy), None)
        if following is not None:
            ahead = 100 * (1 - best.layer_ms / following.layer_ms)
            apart = f"{ahead:.1f} % ahead of" if ahead >= TIE_PCT else "not told apart from"
            text += f", {apart} the next: {following.policy} ({following.flow}, {following.dispatcher})"
        said.append(text)
    return "; ".join(said)


def better_still(cell: Cell, tried: Iterable[Tried]) -> str:
    """A sentence where something simpler gains more in this cell than co-scheduling, else nothing."""
    here = [row for row in tried if (row.phase, row.tokens_a_rank) == (cell.phase, cell.tokens_a_rank)
            and (row.flow == "dp") == (cell.flow == "dp")]  # fmt: skip
    best = min(here, key=lambda row: row.layer_ms, default=None)
    if best is None or best.policy in (NONE, BOTH) or best.gain_pct < cell.gain_pct + TIE_PCT:
        return ""
    return f" Simpler and better there: {best.policy}, {best.gain_pct:+.1f} %."
