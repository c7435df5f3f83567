"""Weights of MoE layers: seeded ones of any model's shape, or the tiny model's; built for the slots of one rank only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.specs import ModelSpec

from .reference.experts import ExpertBiases


class WeightSource(Protocol):
    """Layers are counted from 0 over the MoE layers; experts are logical."""

    hidden: int
    num_experts: int

    def gate_EH(self, layer: int) -> Tensor: ...

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """(w13 [2F, H]: gate projection above up projection, w2 [H, F])."""
        ...


class RandomWeights:
    """Normal weights of variance 1 / fan-in in a model's shape; expert e of layer l is the same on every rank.

    scale < 1 shrinks hidden and expert width (rounded to multiples of 16), for machines that are too small.
    """

    def __init__(self, model: ModelSpec, scale: float = 1.0, seed: int = 0) -> None:
        if not 0 < scale <= 1:
            raise UserError(f"weights scale={scale} must lie in (0, 1]")
        self.hidden, self.ffn = (_scaled(size, scale) for size in (model.hidden, model.expert_ffn))
        self.num_experts, self.layers, self.seed = model.num_experts, model.num_moe_layers, seed

    def gate_EH(self, layer: int) -> Tensor:
        return self._normal((self.num_experts, self.hidden), layer, self.num_experts) / self.hidden**0.5

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        both = self._normal((3 * self.ffn * self.hidden,), layer, expert)
        w13, w2 = both.split([2 * self.ffn * self.hidden, self.ffn * self.hidden])
        return w13.view(2 * self.ffn, self.hidden) / self.hidden**0.5, w2.view(self.hidden, self.ffn) / self.ffn**0.5

    def _normal(self, shape: tuple[int, ...], layer: int, what: int) -> Tensor:
        number = (self.seed * self.layers + layer) * (self.num_experts + 1) + what
        return torch.randn(shape, generator=torch.Generator().manual_seed(number))


class TinyWeights:
    """The tiny model's checkpoint (default: the bundled one)."""

    def __init__(self, folder: Path | None = None) -> None:
        from .models.checkpoint import TINY_DIR, load_model

        self.model = load_model(folder or TINY_DIR)
        self.hidden, self.num_experts = self.model.config.hidden, self.model.config.num_experts

    def gate_EH(self, layer: int) -> Tensor:
        return self.model.moe_tensors(layer)[0]

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        _, w13_E2FH, w2_EHF = self.model.moe_tensors(layer)
        return w13_E2FH[expert], w2_EHF[expert]


@dataclass(frozen=True, eq=False)
class RankWeights:
    """What one rank holds of one MoE layer: the whole gate and the experts in its slots (an empty slot is zero).

    gate_bias_E, biases: of models that have them (GPT-OSS).
    """

    gate_EH: Tensor
    w13_S2FH: Tensor
    w2_SHF: Tensor
    gate_bias_E: Tensor | None = None
    biases: ExpertBiases | None = None


class BiasedWeights(Protocol):
    """What a WeightSource has beside for models with biases; None: this one has none."""

    def gate_bias_E(self, layer: int) -> Tensor | None: ...

    def biases_E(self, layer: int) -> ExpertBiases | None: ...


def gate_bias_of(source: WeightSource, layer: int) -> Tensor | None:
    return source.gate_bias_E(layer) if hasattr(source, "gate_bias_E") else None


def biases_of(source: WeightSource, layer: int) -> ExpertBiases | None:
    """Of all logical experts."""
    return source.biases_E(layer) if hasattr(source, "biases_E") else None


def rank_weights(
    source: WeightSource,
    placement: Placement,
    layer: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> RankWeights:
    """The weights of `rank` in `layer`; gate rows in logical order (MoELayer permutes them where the placement allows)."""
    if placement.num_experts != source.num_experts:
        raise UserError(f"placement of {placement.num_experts} experts for weights of {source.num_experts}")
    per_rank = placement.slots_per_rank
    experts = placement.physical_to_logical_LP[layer, rank * per_rank : (rank + 1) * per_rank].tolist()
    first_13, first_2 = source.expert(layer, 0)
    w13 = torch.zeros(per_rank, *first_13.shape, dtype=dtype, device=device)
    w2 = torch.zeros(per_rank, *first_2.shape, dtype=dtype, device=device)
    for slot, expert in enumerate(experts):
        if expert >= 0:
            w13[slot], w2[slot] = source.expert(layer, expert)
    bias_E, all_biases = gate_bias_of(source, layer), biases_of(source, layer)
    biases = None
    if all_biases is not None:
        held_S = torch.tensor(experts).clamp(min=0)
        own = (tensor[held_S].to(device, dtype) for tensor in (all_biases.up_S2F, all_biases.down_SH))
        biases = ExpertBiases(*own)
    gate_bias_E = None if bias_E is None else bias_E.to(device, dtype)
    return RankWeights(source.gate_EH(layer).to(device, dtype), w13, w2, gate_bias_E, biases)


def _scaled(size: int, scale: float) -> int:
    return size if scale == 1.0 else max(16, round(size * scale / 16) * 16)
