"""LayerTimes: how long each phase of each MoE layer of one forward pass takes, and the pass as a whole.

A layer is plan -> gate -> permute -> srs -> dispatch -> experts -> combine -> sag (+ shared experts, `other`), each as
long as its slowest rank: the exchanges between them are barriers. scope "moe_layers" is what the harness's MoE stack
runs; "full_model" adds attention, dense layers, LM head and the host's share to the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from semmoe.traffic import Traffic

from .cost.attention import AttentionLoad
from .cost.model import CostModel

Float = NDArray[np.float64]
EXCHANGES = ("srs", "dispatch", "combine", "sag")
PHASES = ("plan", "gate", "permute", "srs", "dispatch", "experts", "combine", "sag", "other")


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """phases_L[name]: milliseconds per MoE layer (absent: the flow has no such phase). attention_ms: one block.
    step_ms: the whole forward pass within the scope. waits_L[name]: waiting of the mean rank, a part of the phases
    (CostModel.waits)."""

    phases_L: dict[str, Float]
    step_ms: float
    attention_ms: float = 0.0
    layer_ms_L: Float = field(default_factory=lambda: np.zeros(0))
    waits_L: dict[str, Float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StepTimes:
    """LayerTimes of S steps as columns: phases_SL[name] is [S, L], and so on."""

    phases_SL: dict[str, Float]
    step_ms_S: Float
    attention_ms_S: Float
    layer_ms_SL: Float
    waits_SL: dict[str, Float] = field(default_factory=dict)

    def each(self, steps: int) -> Iterator[LayerTimes]:
        """The first `steps` one by one."""
        for s in range(steps):
            phases_L = {name: ms_SL[s] for name, ms_SL in self.phases_SL.items()}
            waits_L = {name: ms_SL[s] for name, ms_SL in self.waits_SL.items()}
            step_ms, attention_ms = float(self.step_ms_S[s]), float(self.attention_ms_S[s])
            yield LayerTimes(phases_L, step_ms, attention_ms, self.layer_ms_SL[s], waits_L)


def time_layers(
    cost: CostModel,
    traffic: Traffic,
    load: AttentionLoad | None = None,
    barrier_each_layer: bool = False,
) -> LayerTimes:
    """Price one forward pass. load: what attention has to do (None: scope moe_layers). No tokens take no time.

    barrier_each_layer: ranks meet before every layer, as the harness does with fixed batches, and not once a step. A whole
    model's step is timed in a pass of its own without these barriers."""
    return next(time_steps(cost, traffic, np.array([traffic.tokens]), load, barrier_each_layer).each(1))


def time_steps(
    cost: CostModel,
    traffic: Traffic,
    tokens_S: NDArray[np.integer],
    load: AttentionLoad | None = None,
    barrier_each_layer: bool = False,
) -> StepTimes:
    """Price S forward passes of so many tokens at once, as one of S * L layers. load: of [S, G] (or [G] where S = 1)."""
    layers, steps = traffic.num_layers, len(tokens_S)
    if not traffic.tokens:
        return StepTimes({}, np.zeros(steps), np.zeros(steps), np.zeros((steps, layers // steps)))
    phases = {"gate": cost.gate(traffic), "permute": cost.permute(traffic)}
    plan_ms = {tokens: cost.plan(tokens) for tokens in set(tokens_S.tolist())}
    if any(plan_ms.values()):
        phases["plan"] = np.repeat([plan_ms[tokens] for tokens in tokens_S.tolist()], layers // steps)
    experts_LG = cost.experts_by_rank(traffic.expert_rows_LG, traffic.active_experts_LG)
    phases["experts"] = cost.slowest(experts_LG)
    phases |= cost.collectives(traffic)
    attention_S = outside_S = np.zeros(steps)
    if load is not None:
        attention_S = np.reshape(cost.attention(load), steps)
        outside_S = np.reshape(cost.outside_layers(load), steps)
        shared_S = np.reshape(cost.shared(load), steps)
        if shared_S.any():
            phases["other"] = np.repeat(shared_S, layers // steps)
    start_ms = cost.start()
    starts = layers // steps if barrier_each_layer and load is None else 1
    bare_SL = sum(phases.values(), np.zeros(layers)).reshape(steps, -1)
    step_S = bare_SL.sum(axis=1) + cost.model.num_layers * attention_S + outside_S + starts * start_ms
    first = next((name for name in EXCHANGES if name in phases), None)
    if (
        start_ms and first is not None
    ):  # ranks that meet leave the barrier one after the other, which that exchange waits for
        begins_L = np.arange(layers) % (1 if barrier_each_layer else layers // steps) == 0
        phases[first] = phases[first] + start_ms * begins_L
    layer_SL = sum(phases.values(), np.zeros(layers)).reshape(steps, -1)
    if load is not None:
        step_S = np.maximum(step_S, cost.eager_ms(load))
    phases_SL = {name: ms.reshape(steps, -1) for name, ms in phases.items()}
    waits_SL = {name: ms.reshape(steps, -1) for name, ms in cost.waits(traffic, experts_LG).items()}
    return StepTimes(phases_SL, step_S, attention_S, layer_SL, waits_SL)
