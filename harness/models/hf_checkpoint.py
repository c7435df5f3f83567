"""MoE layers of a local Hugging Face checkpoint as a WeightSource: tensors are read one by one, when they are asked for.

    config.json                       model_type says which names the tensors have (NAMINGS)
    model.safetensors.index.json      tensor -> shard; absent where one model.safetensors holds everything

    deepseek_v2, qwen2_moe,           mlp.gate.weight [E, H], mlp.experts.{e}.gate_proj / up_proj [F, H], down_proj [H, F]
    qwen3_moe, olmoe
    mixtral                           the same below block_sparse_moe, named w1 / w3 and w2
    gpt_oss                           mlp.router (weight and bias) and all experts in one tensor: gate_up_proj [E, H, 2F],
                                      columns gate, up, gate, up, ...; down_proj [E, F, H]; a bias for each

Routed experts only: a shared expert belongs to the layer's dense part. DeepSeek's routed_scaling_factor is multiplied
into the down projection. GPT-OSS experts have biases and a clamped activation: `reference.experts.ExpertBiases`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from semmoe.errors import UserError
from semmoe.files import read_object
from semmoe.specs import ModelSpec

from ..reference.experts import ExpertBiases

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
REMEDY = "a checkpoint folder holds config.json and safetensors files"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Naming:
    """Names below `model.layers.{layer}.`; the expert projections hold {expert} unless one tensor has all experts."""

    gate: str
    gate_proj: str
    up_proj: str
    down_proj: str
    fused: bool = False


def _separate(block: str, gate: str, up: str, down: str) -> Naming:
    expert = block + ".experts.{expert}."
    return Naming(f"{block}.gate.weight", f"{expert}{gate}.weight", f"{expert}{up}.weight", f"{expert}{down}.weight")


_LLAMA_LIKE = _separate("mlp", "gate_proj", "up_proj", "down_proj")
_ALL_IN_ONE = "mlp.experts.gate_up_proj"
NAMINGS = {
    "deepseek_v2": _LLAMA_LIKE,
    "qwen2_moe": _LLAMA_LIKE,
    "qwen3_moe": _LLAMA_LIKE,
    "olmoe": _LLAMA_LIKE,
    "mixtral": _separate("block_sparse_moe", "w1", "w3", "w2"),
    "gpt_oss": Naming("mlp.router.weight", _ALL_IN_ONE, _ALL_IN_ONE, "mlp.experts.down_proj", fused=True),
}


class HFCheckpoint:
    """Layers are counted from 0 over model.layer_ids. UserError names file and tensor: missing, of another shape than
    the ModelSpec asks for, not finite, or quantised."""

    def __init__(self, folder: str | Path, model: ModelSpec) -> None:
        self.folder, self.model = Path(folder), model
        self.hidden, self.num_experts = model.hidden, model.num_experts
        config = read_object(self.folder / "config.json", REMEDY)
        kind = str(config.get("model_type"))
        if kind not in NAMINGS:
            raise UserError(
                f"{self.folder / 'config.json'}: model_type '{kind}'; this reader knows {', '.join(NAMINGS)}"
            )
        self.naming = NAMINGS[kind]
        self._scale = float(config.get("routed_scaling_factor") or 1.0) if kind == "deepseek_v2" else 1.0
        self._open: dict[Path, Any] = {}
        self._index, self._file_of = self._read_index()
        for layer in range(model.num_moe_layers):
            for name in self._names(layer):
                self._where(name)

    def gate_EH(self, layer: int) -> Tensor:
        return self._tensor(self._name(layer, self.naming.gate), (self.num_experts, self.hidden))

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """(w13 [2F, H]: gate projection above up projection, w2 [H, F])."""
        if self.naming.fused:
            return self._fused_expert(layer, expert)
        ffn, hidden, naming = self.model.expert_ffn, self.hidden, self.naming
        w1, w3 = (self._tensor(self._name(layer, p, expert), (ffn, hidden)) for p in (naming.gate_proj, naming.up_proj))
        w2 = self._tensor(self._name(layer, naming.down_proj, expert), (hidden, ffn))
        return torch.cat([w1, w3]), w2 if self._scale == 1.0 else w2 * self._scale

    def _fused_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """Worked example: columns g0 u0 g1 u1 of gate_up_proj become rows g0 g1 u0 u1 of w13."""
        ffn, hidden, count = self.model.expert_ffn, self.hidden, self.num_experts
        up_name, down_name = (self._name(layer, p) for p in (self.naming.gate_proj, self.naming.down_proj))
        up_H2F = self._tensor(up_name, (count, hidden, 2 * ffn), expert)
        down_FH = self._tensor(down_name, (count, ffn, hidden), expert)
        return _apart(up_H2F.T), down_FH.T.contiguous()

    def biases_E(self, layer: int) -> ExpertBiases | None:
        """Of all experts; None where the model has none."""
        if not self.naming.fused:
            return None
        up_name, down_name = (self._name(layer, p) + "_bias" for p in (self.naming.gate_proj, self.naming.down_proj))
        up_E2F = self._tensor(up_name, (self.num_experts, 2 * self.model.expert_ffn))
        return ExpertBiases(_apart(up_E2F.T).T.contiguous(), self._tensor(down_name, (self.num_experts, self.hidden)))

    def gate_bias_E(self, layer: int) -> Tensor | None:
        """Added to the gate logits; None where the model has none."""
        if not self.naming.fused:
            return None
        return self._tensor(self._name(layer, self.naming.gate).removesuffix("weight") + "bias", (self.num_experts,))

    def _name(self, layer: int, pattern: str, expert: int | None = None) -> str:
        return f"model.layers.{self.model.layer_ids[layer]}." + pattern.format(expert=expert)

    def _names(self, layer: int) -> list[str]:
        """Every tensor that this layer needs."""
        naming = self.naming
        if naming.fused:
            up, down = (self._name(layer, p) for p in (naming.gate_proj, naming.down_proj))
            gate = self._name(layer, naming.gate)
            return [gate, gate.removesuffix("weight") + "bias", up, up + "_bias", down, down + "_bias"]
        projections = (naming.gate_proj, naming.up_proj, naming.down_proj)
        experts = [self._name(layer, p, e) for e in range(self.num_experts) for p in projections]
        return [self._name(layer, naming.gate), *experts]

    def _read_index(self) -> tuple[Path, dict[str, Path]]:
        """(the file that lists the tensors, tensor -> file that holds it)."""
        single, index = self.folder / SINGLE, self.folder / INDEX
        if not index.exists():
            if not single.exists():
                raise UserError(f"{self.folder}: holds neither {INDEX} nor {SINGLE}")
            return single, dict.fromkeys(self._file(single).keys(), single)
        content = read_object(index, REMEDY)
        if not isinstance(content.get("weight_map"), dict):
            raise UserError(f"{index}: lacks weight_map (tensor name -> shard)")
        return index, {name: self.folder / str(shard) for name, shard in content["weight_map"].items()}

    def _where(self, name: str) -> Path:
        if name in self._file_of:
            return self._file_of[name]
        if name + "_blocks" in self._file_of:
            raise UserError(f"{self._index}: tensor {name} is in MXFP4 ({name}_blocks); save it in bf16 first")
        raise UserError(f"{self._index}: tensor {name} is missing")

    def _file(self, path: Path) -> Any:
        """The opened (memory-mapped) shard; every shard is opened once."""
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise UserError(f"{path}: no such file, although {INDEX} names it") from None
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: not a readable safetensors file ({error})") from None
        return self._open[path]

    def _tensor(self, name: str, shape: tuple[int, ...], row: int | None = None) -> Tensor:
        """A tensor of this shape, or its row `row` alone."""
        path = self._where(name)
        file = self._file(path)
        try:
            part = file.get_slice(name)
            found = tuple(part.get_shape())
            if found != shape:
                raise UserError(
                    f"{path}: tensor {name} has shape {list(found)}; model {self.model.name} asks for {list(shape)}"
                )
            value: Tensor = part[:] if row is None else part[row]
        except SafetensorError:
            raise UserError(f"{path}: tensor {name} is missing, although {INDEX} places it there") from None
        if value.dtype not in FLOATS:
            raise UserError(f"{path}: tensor {name} is {value.dtype}: quantised; save it in bf16 first")
        if not torch.isfinite(value).all():
            raise UserError(f"{path}: tensor {name} holds NaN or infinite values")
        return value


def _apart(rows: Tensor) -> Tensor:
    """Interleaved gate and up rows (or elements) as gate above up."""
    return torch.cat([rows[0::2], rows[1::2]])
