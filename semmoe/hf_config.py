"""ModelSpec from any Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import UserError
from .files import read_object
from .kinds import is_kind
from .specs import ModelSpec


def model_from_hf_config(path: str | Path, name: str | None = None) -> ModelSpec:
    """Read a Hugging Face `config.json` (or the directory that holds it).

    Knows the families DeepSeek-V2/V3 (and Moonlight), Qwen2/3-MoE, Mixtral, OLMoE and GPT-OSS through the key
    names that they share. Raises UserError for a file that is missing, no JSON, or describes no MoE.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    raw = read_object(path, "give a Hugging Face config.json or its directory")
    return _from_hf(raw, name or str(raw.get("_name_or_path") or path.parent.name or raw.get("model_type")), path)


COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim",
          "n_routed_experts", "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token",
          "moe_intermediate_size", "moe_layer_freq", "decoder_sparse_step", "qk_nope_head_dim")  # fmt: skip
COUNTS_OR_0 = ("first_k_dense_replace", "n_shared_experts", "shared_expert_intermediate_size", "intermediate_size", "n_group",
               "topk_group", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")  # fmt: skip


def _check_kinds(raw: dict[str, Any], path: Path) -> None:
    """UserError naming the first field whose value is not of its kind; null is absent."""
    for key in (*COUNTS, *COUNTS_OR_0):
        value, low = raw.get(key), int(key in COUNTS)
        if value is not None and not (is_kind(value, int) and value >= low):
            raise UserError(f"{path}: {key}={value!r} must be a whole number of at least {low}")
    if not isinstance(raw.get("mlp_only_layers") or [], list):
        raise UserError(f"{path}: mlp_only_layers={raw['mlp_only_layers']!r} must be a list of layers")
    if not isinstance(raw.get("quantization_config") or {}, dict):
        raise UserError(f"{path}: quantization_config={raw['quantization_config']!r} must be an object")


def _first(raw: dict[str, Any], *keys: str, default: Any = None) -> Any:
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    return default


def _from_hf(raw: dict[str, Any], name: str, path: Path) -> ModelSpec:
    experts = _first(raw, "n_routed_experts", "num_local_experts", "num_experts")
    if not experts:
        raise UserError(
            f"{path}: describes no mixture of experts (none of n_routed_experts, num_local_experts, "
            f"num_experts); model_type is {raw.get('model_type')!r}"
        )
    _check_kinds(raw, path)
    missing = [
        key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if raw.get(key) is None
    ]
    if _first(raw, "moe_intermediate_size", "intermediate_size") is None:
        missing.append("moe_intermediate_size")
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; a full Hugging Face config.json is needed")
    num_layers = int(raw["num_hidden_layers"])
    first_dense = int(_first(raw, "first_k_dense_replace", default=0))
    step = int(_first(raw, "moe_layer_freq", "decoder_sparse_step", default=1))
    mlp_only = set(_first(raw, "mlp_only_layers", default=[]))
    is_qwen = "decoder_sparse_step" in raw
    layer_ids = tuple(
        i
        for i in range(first_dense, num_layers)
        if i not in mlp_only and ((i + 1) % step == 0 if is_qwen else i % step == 0)
    )
    mla = raw.get("kv_lora_rank") is not None
    heads = int(raw["num_attention_heads"])
    expert_ffn = int(_first(raw, "moe_intermediate_size", "intermediate_size"))
    shared = int(_first(raw, "n_shared_experts", default=0) or 0)
    shared_ffn = expert_ffn
    if raw.get("shared_expert_intermediate_size"):
        shared, shared_ffn = 1, int(raw["shared_expert_intermediate_size"])
    quant = str((raw.get("quantization_config") or {}).get("quant_method", ""))
    dtype = {"float32": "fp32", "float16": "fp16"}.get(str(_first(raw, "torch_dtype", "dtype")), "bf16")
    return ModelSpec(
        name=name,
        hidden=int(raw["hidden_size"]),
        num_layers=num_layers,
        layer_ids=layer_ids,
        num_experts=int(experts),
        top_k=int(_first(raw, "num_experts_per_tok", "experts_per_token", default=2)),
        expert_ffn=expert_ffn,
        vocab_size=int(raw["vocab_size"]),
        num_heads=heads,
        num_kv_heads=int(_first(raw, "num_key_value_heads", default=heads)),
        head_dim=int(raw["qk_nope_head_dim"])
        if mla
        else int(_first(raw, "head_dim", default=raw["hidden_size"] // heads)),
        shared_experts=shared,
        shared_ffn=shared_ffn if shared else 0,
        dense_ffn=int(raw.get("intermediate_size") or 0) if len(layer_ids) < num_layers else 0,
        n_group=int(raw.get("n_group") or 1),
        topk_group=int(raw.get("topk_group") or 1),
        renormalise=bool(raw.get("norm_topk_prob", raw.get("model_type") in ("mixtral", "gpt_oss"))),
        scoring=str(_first(raw, "scoring_func", default="softmax")),
        attention="mla" if mla else "gqa",
        q_lora_rank=int(raw.get("q_lora_rank") or 0),
        kv_lora_rank=int(raw.get("kv_lora_rank") or 0),
        rope_head_dim=int(raw.get("qk_rope_head_dim") or 0) if mla else 0,
        v_head_dim=int(raw.get("v_head_dim") or 0) if mla else 0,
        weight_dtype=dtype,
        expert_dtype={"fp8": "fp8", "mxfp4": "mxfp4"}.get(quant, dtype),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )
