"""Where the time of a window goes that all ranks begin and end together (a layer of a fixed batch, a served step).

Ranks of one machine share its monotonic clock, so the marks of their timers can be laid beside each other. With T_x the
time at which the last rank enters exchange x, a rank inside x

    waits for others                  until T_x, while no rank on its core computes
    waits for its core ("core_wait")  while another rank on its core computes (the more so where both do: half each)
    exchanges                         from T_x on, while no rank on its core computes

The critical path goes from T_x to T_(x+1) with the rank that is the last to enter exchange x + 1, and at the end with the
last rank to end: what its core computes meanwhile, for whichever rank, is phases of the path, the rest of the time is the
exchange itself. Nobody waits for another rank on the path, so its phases add up to the window.
Worked example, two ranks on a core each, gate then dispatch: rank 0 enters at 3, rank 1 at 5, both leave at 9: path gate
5, dispatch 4; waiting, mean over ranks: (5 - 3 + 0) / 2 = 1. Both on one core, rank 1's gate 3 to 5 after rank 0's 0 to 3:
the same path, and rank 0 waits 2 for its core, rank 1 (from the start on) 3.
"""

from __future__ import annotations

import platform
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .timing import EXCHANGES, PHASES, Marks

Float = NDArray[np.float64]
BETWEEN, LATE, DONE = "between", "late", "done"  # layers of a served step; before the first one, after the last one
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, eq=False)
class Attribution:
    """Nanoseconds of every layer. path_L[phase]: on the critical path. wait_L, core_wait_L: mean over ranks."""

    path_L: dict[str, Float]
    wait_L: Float
    core_wait_L: Float


def attribute(marks_GL: Sequence[Sequence[Marks]], core_G: Sequence[Hashable]) -> Attribution:
    """See the module. marks_GL: of every rank and layer of the window, the same phases in the same order on all ranks.
    core_G: what a rank computes on; ranks with equal ones share it."""
    label_N, layer_N = _labels(marks_GL[0])
    ranks, layers = len(marks_GL), len(marks_GL[0])
    end_GN = np.array([[ns for marks in marks_L for _, ns in marks] for marks_L in marks_GL], dtype=np.int64)
    exchange_N = np.isin(label_N, EXCHANGES)
    idle_N = np.isin(label_N, (LATE, DONE))
    point_I, last = np.unique(end_GN[:, :]), end_GN[:, -1].max()
    start_I, took_I = point_I[:-1], np.diff(point_I)
    state_GI = np.stack([np.searchsorted(end_N, start_I, side="right") for end_N in end_GN])  # beyond the last: DONE
    assert last == point_I[-1]

    entry_GX = end_GN[:, np.flatnonzero(exchange_N) - 1]
    all_in_X = np.maximum.accumulate(entry_GX.max(axis=0))
    last_rank_X = np.append(entry_GX.argmax(axis=0), end_GN[:, -1].argmax())
    critical_I = last_rank_X[np.searchsorted(all_in_X, start_I, side="right")]

    computes_GI = ~exchange_N[state_GI] & ~idle_N[state_GI]
    same_GG = np.array([[a == b for b in core_G] for a in core_G])
    computing_GI = same_GG.astype(np.int64) @ computes_GI  # ranks that compute on the core of each
    path_N = np.zeros(len(label_N))
    share_GI = computes_GI & same_GG[critical_I].T
    np.add.at(path_N, state_GI, np.where(share_GI, took_I / np.maximum(computing_GI, 1), 0.0))
    nobody_I = computing_GI[critical_I, np.arange(len(start_I))] == 0
    np.add.at(path_N, state_GI[critical_I, np.arange(len(start_I))], np.where(nobody_I, took_I, 0))

    all_in_N = np.full(len(label_N), last)
    all_in_N[exchange_N] = all_in_X
    early_GI = (start_I < all_in_N[state_GI]) & (label_N[state_GI] != LATE)
    waits_GI = (computing_GI == 0) & early_GI
    core_waits_GI = np.where(computes_GI, 1 - 1 / np.maximum(computing_GI, 1), computing_GI > 0)
    layer_GI = layer_N[state_GI]

    def mean_L(weight_GI: Float) -> Float:
        return np.bincount(layer_GI.ravel(), (weight_GI * took_I).ravel(), layers) / ranks

    path_L = {
        phase: np.bincount(layer_N[label_N == phase], path_N[label_N == phase], layers).astype(np.float64)
        for phase in PHASES
    }
    return Attribution(path_L, mean_L(waits_GI.astype(np.float64)), mean_L(core_waits_GI.astype(np.float64)))


def _labels(marks_L: Sequence[Marks]) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """(phase, layer) of every stretch that a mark ends, and of what follows the last."""
    labels, layers = [], []
    for layer, marks in enumerate(marks_L):
        labels += [BETWEEN if layer else LATE, *(phase for phase, _ in marks[1:])]
        layers += [layer] * len(marks)
    return np.array([*labels, DONE]), np.array([*layers, len(marks_L) - 1])


def clock_id() -> str:
    """Equal on processes whose monotonic clocks are one: those of one boot of one machine."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    return f"{platform.node()} {boot.strip()}"
