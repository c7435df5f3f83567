"""Reading and writing the tiny model in the format of Hugging Face's Qwen3MoeForCausalLM.

On disk: `config.json` (model_type qwen3_moe) and `model.safetensors` with one tensor per expert projection, bfloat16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

import semmoe
from semmoe.errors import UserError
from semmoe.files import read_object

from .tiny import TinyConfig, TinyModel

TINY_DIR = Path(semmoe.__file__).parent / "assets" / "tiny"
END_OF_TEXT_ID = 0  # starts every document and every request
# our field -> the key in config.json
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "rope_theta": "rope_theta",
    "rms_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
PARTS = {"input_norm": "input_layernorm", "attention": "self_attn", "post_attention_norm": "post_attention_layernorm"}


def hf_config(config: TinyConfig) -> dict[str, Any]:
    """The config.json that makes transformers build the same network."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{key: getattr(config, name) for name, key in CONFIG_KEYS.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "intermediate_size": config.expert_ffn,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "router_aux_loss_coef": 0.01,
        "output_router_logits": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }


def load_config(folder: Path) -> TinyConfig:
    path = folder / "config.json"
    raw = read_object(path, "the folder of a checkpoint holds config.json and model.safetensors")
    if raw.get("model_type") != "qwen3_moe":
        raise UserError(f"{path}: model_type {raw.get('model_type')!r}; this reader knows 'qwen3_moe' only")
    missing = [key for key in CONFIG_KEYS.values() if key not in raw]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}")
    return TinyConfig(**{name: raw[key] for name, key in CONFIG_KEYS.items()})


def to_disk_names(model: TinyModel) -> dict[str, Tensor]:
    """Tensors under the names on disk; the stacked experts come apart into views."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name == "embed_VH":
            tensors["model.embed_tokens.weight"] = value
        elif ".moe." in name:
            mlp, _, kind = name.rpartition(".moe.")
            tensors |= {f"model.{mlp}.mlp.{key}.weight": part for key, part in _experts_apart(kind, value)}
        else:
            tensors["model." + ".".join(PARTS.get(part, part) for part in name.split("."))] = value
    return tensors


def _experts_apart(kind: str, value: Tensor) -> list[tuple[str, Tensor]]:
    if kind == "gate_EH":
        return [("gate", value)]
    if kind == "w2_EHF":
        return [(f"experts.{e}.down_proj", down) for e, down in enumerate(value)]
    halves = [(e, w13.chunk(2)) for e, w13 in enumerate(value)]
    return [
        (f"experts.{e}.{key}", half)
        for e, pair in halves
        for key, half in zip(("gate_proj", "up_proj"), pair, strict=True)
    ]


def save_model(model: TinyModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors, each replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(hf_config(model.config), indent=2) + "\n")
    os.replace(partial, folder / "config.json")
    partial = folder / "model.safetensors.partial"
    tensors = {name: value.to(dtype).clone().contiguous() for name, value in to_disk_names(model).items()}
    partial.write_bytes(save(tensors, metadata={"format": "pt"}))  # save_file would make it private to its owner
    os.replace(partial, folder / "model.safetensors")


@torch.no_grad()
def load_model(folder: Path = TINY_DIR, dtype: torch.dtype = torch.float32) -> TinyModel:
    """The model of a checkpoint folder; a missing, misshapen or non-finite tensor is named with its file."""
    model = TinyModel(load_config(folder)).to(dtype)
    path = folder / "model.safetensors"
    try:
        loaded = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `python -m harness.models.train` makes one") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    for name, target in to_disk_names(model).items():  # views: copying into them fills the stacked parameters
        if name not in loaded:
            raise UserError(f"{path}: tensor {name} is missing")
        source = loaded[name]
        if source.shape != target.shape:
            raise UserError(
                f"{path}: tensor {name} has shape {list(source.shape)}; config.json asks for {list(target.shape)}"
            )
        if not torch.isfinite(source).all():
            raise UserError(f"{path}: tensor {name} holds NaN or infinite values")
        target.copy_(source)
    return model.eval()
