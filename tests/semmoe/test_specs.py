"""Model presets against the public config.json files' values, memory fit, and cluster files that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from semmoe.errors import UserError
from semmoe.hf_config import model_from_hf_config
from semmoe.plugins import instantiate
from semmoe.specs import ClusterSpec, Curve, ModelSpec, check_fits

CONF = Path(__file__).resolve().parents[2] / "conf"
ASSETS = Path(__file__).resolve().parents[2] / "semmoe" / "assets"

DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "vocab_size": 102400,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "quantization_config": {"quant_method": "mxfp4"},
    "tie_word_embeddings": False,
}
PUBLIC: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "moonlight-16b-a3b": DEEPSEEK_V2_LITE
    | {
        "model_type": "deepseek_v3",
        "intermediate_size": 11264,
        "vocab_size": 163840,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
    },
    "qwen3-30b-a3b": QWEN3,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128},
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 1024,
        "vocab_size": 50304,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "norm_topk_prob": False,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "tiny": json.loads((ASSETS / "tiny" / "config.json").read_text()),
}
TOTAL_BILLIONS = {
    "deepseek-v2-lite": 15.7,
    "moonlight-16b-a3b": 16.0,
    "deepseek-v3": 671.0,
    "qwen3-30b-a3b": 30.5,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.9,
}


def preset(name: str) -> ModelSpec:
    return instantiate(yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text()), "model")


def test_every_preset_has_a_public_config_to_agree_with():
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} - {"hf"} == set(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_preset_and_hugging_face_config_give_the_same_model(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]))
    assert model_from_hf_config(tmp_path, name) == preset(name)


@pytest.mark.parametrize("name", sorted(TOTAL_BILLIONS))
def test_presets_hold_as_many_parameters_as_their_authors_say(name):
    model = preset(name)
    in_bf16 = ModelSpec(**(vars(model) | {"expert_dtype": "bf16"}))
    billions = in_bf16.weight_bytes_per_rank(model.num_experts) / 2 / 1e9
    assert billions == pytest.approx(TOTAL_BILLIONS[name], rel=0.01)


def test_kv_cache_of_a_latent_and_of_a_grouped_query_model_by_hand():
    assert preset("deepseek-v2-lite").kv_bytes_per_token == 27 * (512 + 64) * 2
    assert preset("qwen3-30b-a3b").kv_bytes_per_token == 48 * 2 * 4 * 128 * 2


def cluster_raw(**changes: Any) -> dict[str, Any]:
    raw = {
        "name": "x",
        "nodes": 1,
        "ranks_per_node": 8,
        "topology": "switch",
        "memory_gib": 80,
        "memory_gbps": 3350,
        "bf16_tflops": 989,
        "link_gbps": 275,
        "alpha_us": 11,
    }
    return {key: value for key, value in (raw | changes).items() if value is not None}


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"deepseek-v3 needs 1\d\d\.\d GiB of weights a rank on x, which has 80 GiB"):
        check_fits(preset("deepseek-v3"), ClusterSpec.from_dict(cluster_raw()), 32)
    assert check_fits(preset("deepseek-v2-lite"), ClusterSpec.from_dict(cluster_raw()), 8) > 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topologie": "mesh"}, r"unknown key 'topologie' \(did you mean 'topology'"),
        ({"topology": "ring"}, "topology 'ring'"),
        ({"alpha_us": None}, "lacks alpha_us"),
        ({"link_gbps": 0}, "link_gbps=0 must be positive"),
        ({"nodes": 2}, "2 nodes need nic_gbps"),
        ({"curves": [{"op": "alltoall", "ranks": 8, "bytes": [2, 1], "latency_us": [1, 1]}]}, "increasing"),
        ({"curves": [{"op": "alltoall", "ranks": 8, "bytes": [1, 2], "latency_us": [1]}]}, "same length"),
        ({"curves": [{"op": "alltoall", "ranks": 8, "bytes": [1], "latency_us": [float("nan")]}]}, "positive numbers"),
    ],
)
def test_a_cluster_file_that_cannot_work_says_why(changes, message):
    with pytest.raises(UserError, match=message):
        ClusterSpec.from_dict(cluster_raw(**changes))


def test_the_digest_of_a_cluster_follows_its_content():
    first, same = (ClusterSpec.from_dict(cluster_raw()) for _ in range(2))
    curve = Curve(op="alltoall", ranks=8, bytes=(1,), latency_us=(2,))
    assert first.digest == same.digest
    assert first.digest != ClusterSpec.from_dict(cluster_raw(curves=[curve])).digest
