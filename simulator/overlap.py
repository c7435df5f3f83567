"""Two-batch overlap: a step's tokens as two halves in flight, one computing while the other communicates.

Per layer a half goes through: attention, gate and packing (compute); srs and dispatch (exchange); experts (compute); combine
and sag (exchange). Compute and exchange each serve one half at a time, first half first; a half waits for its own previous
phase. What is saved is the shorter of compute and exchange; what it costs is that each half streams the expert weights
again and pays the floor of every exchange. Compute and exchange do not slow each other here.

    half A   |attn|  dispatch  |experts|  combine  |attn| ...
    half B         |attn|  dispatch  |experts|  combine | ...
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from semmoe.serving import StepPlan

from .layer import LayerTimes

Float = NDArray[np.float64]
BEFORE, OUT, BACK = ("plan", "gate", "permute"), ("srs", "dispatch"), ("combine", "sag")


def halves(step: StepPlan) -> tuple[StepPlan, StepPlan] | None:
    """The step's entries in two plans of about equal tokens on every queue; None where no queue has two entries."""
    upto_N = np.cumsum(step.count_N)
    ranks, first_N = np.unique(step.rank_N, return_index=True)  # entries of a queue lie together
    total_N = np.zeros(len(step.rank_N))
    before_N = np.zeros(len(step.rank_N))
    for rank, first in zip(ranks, first_N, strict=True):
        mine = step.rank_N == rank
        before_N[mine] = upto_N[first] - step.count_N[first]
        total_N[mine] = step.count_N[mine].sum()
    second_N = upto_N - step.count_N / 2 - before_N > total_N / 2
    if not second_N.any() or second_N.all():
        return None
    names = ("rank_N", "request_N", "phase_N", "start_N", "count_N")
    first, second = (StepPlan(step.index, *(getattr(step, n)[kept] for n in names)) for kept in (~second_N, second_N))
    return first, second


def overlapped(a: LayerTimes, b: LayerTimes, dense_layers: int, outside_ms: float) -> LayerTimes:
    """Both halves as one step. dense_layers: layers before the MoE layers that have attention only; outside_ms: of the
    whole step (dense feed-forward, LM head, host), not split. phases_L: work of both halves; layer_ms_L: share of the
    step's MoE layers."""
    layers = len(a.layer_ms_L)
    phases_4_2_L = np.stack([_phases(half, layers) for half in (a, b)], axis=1)
    moe_ms = schedule_ms(phases_4_2_L)
    head_ms = dense_layers * (a.attention_ms + b.attention_ms)
    none_L = np.zeros(layers)
    phases = {n: a.phases_L.get(n, none_L) + b.phases_L.get(n, none_L) for n in (a.phases_L | b.phases_L)}
    attention_ms = a.attention_ms + b.attention_ms
    layer_ms_L = np.full(layers, max(moe_ms / layers - attention_ms, 0.0))
    return LayerTimes(phases, moe_ms + head_ms + outside_ms, attention_ms, layer_ms_L)


def _phases(half: LayerTimes, layers: int) -> Float:
    """[4, L]: before the exchange, out, experts and the rest, back."""

    def total(names: tuple[str, ...]) -> Float:
        return np.sum([half.phases_L.get(name, np.zeros(layers)) for name in names], axis=0)

    return np.stack([half.attention_ms + total(BEFORE), total(OUT), total(("experts", "other")), total(BACK)])


@numba.njit(cache=True)
def schedule_ms(phases_4_2_L):  # type: ignore[no-untyped-def]
    """When the later half has left the last layer. Worked example, one layer, both halves (1, 2, 3, 1): A computes 0-1,
    sends 1-3, experts 3-6, back 6-7; B computes 1-2, sends 3-5, experts 6-9, back 9-10: 10, against 14 in turn."""
    ready = np.zeros(2)  # when each half has finished its previous phase
    free = np.zeros(2)  # when compute (0) and exchange (1) are free
    for layer in range(phases_4_2_L.shape[2]):
        for phase in range(4):
            for half in range(2):
                begin = max(ready[half], free[phase % 2])
                ready[half] = free[phase % 2] = begin + phases_4_2_L[phase, half, layer]
    return ready.max()
