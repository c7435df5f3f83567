"""MoE layers read from tiny sharded checkpoints in every naming compute what transformers' own blocks compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from safetensors.torch import load_file, save_file  # noqa: E402

from harness.feeds import open_checkpoint  # noqa: E402
from harness.layer import build_layers  # noqa: E402
from harness.models.hf_checkpoint import INDEX, NAMINGS, HFCheckpoint  # noqa: E402
from harness.reference.experts import run_experts  # noqa: E402
from harness.reference.gate import Gating  # noqa: E402
from harness.transport.virtual import run_virtual  # noqa: E402
from harness.weights import rank_weights  # noqa: E402
from semmoe.dispatch import DispatchSpec  # noqa: E402
from semmoe.errors import UserError  # noqa: E402
from semmoe.hf_config import model_from_hf_config  # noqa: E402
from semmoe.placement.base import Placement  # noqa: E402
from semmoe.specs import ModelSpec  # noqa: E402

EXPERTS, TOP_K, HIDDEN = 8, 3, 32
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 61,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "olmoe": ("OlmoeConfig", {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "head_dim": 8}),
}


def write(family: str, folder: Path) -> Any:
    """A random model of this family, written by transformers in many small shards."""
    name, settings = FAMILIES[family]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(COMMON | settings))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.normal_(std=0.3)  # wide gates: no ties; biases other than zero
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def blocks(model: Any) -> list[Any]:
    parts = [getattr(layer, "block_sparse_moe", None) or layer.mlp for layer in model.model.layers]
    return [block for block in parts if hasattr(block, "experts")]


def routed_part(block: Any, x_TH: Any) -> Any:
    """What transformers' block adds for the routed experts."""
    with torch.no_grad():
        whole = block(x_TH[None])
        whole = (whole[0] if isinstance(whole, tuple) else whole)[0]
        shared = getattr(block, "shared_experts", None)
        return whole if shared is None else whole - shared(x_TH)


def layer_outputs(transport: Any, source: HFCheckpoint, model: ModelSpec, x_TH: Any) -> list[Any]:
    """All MoE layers on this rank's half of the tokens, experts dealt to the ranks in turn."""
    slots = [e for r in range(2) for e in range(r, model.num_experts, 2)]
    table_LP = np.array([slots] * model.num_moe_layers, dtype=np.int32)
    placement = Placement(table_LP, 2, model.layer_ids, model.num_experts)
    spec = DispatchSpec(
        flow="dp", dispatcher="a2a_dedup", hidden=model.hidden, top_k=model.top_k, activation_dtype="fp32"
    )
    layers = build_layers(transport, spec, placement, source, Gating.of(model))
    mine_nH = x_TH.chunk(2)[transport.rank]
    return [layer.forward(mine_nH).y for layer in layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_a_sharded_checkpoint_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    theirs = write(family, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = model_from_hf_config(tmp_path)
    x_TH = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    outputs = run_virtual(2, lambda t: layer_outputs(t, HFCheckpoint(tmp_path, model), model, x_TH))
    assert model.num_moe_layers == len(blocks(theirs)) >= 2
    for layer, block in enumerate(blocks(theirs)):
        want_TH = routed_part(block, x_TH)
        got_TH = torch.cat([of_rank[layer] for of_rank in outputs])
        torch.testing.assert_close(got_TH, want_TH, rtol=1e-4, atol=1e-4)
        assert want_TH.abs().max() > 0.05, "the comparison must not be one of zeros"


def test_without_their_biases_gpt_oss_experts_are_others(tmp_path: Path) -> None:
    """Negative control of the run above, and biases go with their slots: of experts 1, 1, 0."""
    write("gpt_oss", tmp_path)
    model = model_from_hf_config(tmp_path)
    source = HFCheckpoint(tmp_path, model)
    all_biases, bias_E = source.biases_E(0), source.gate_bias_E(0)
    assert all_biases is not None and bias_E is not None and bias_E.abs().min() > 0
    table_LP = np.array([[1, 1, 0, *range(2, EXPERTS), 3]] * model.num_moe_layers, dtype=np.int32)
    placement = Placement(table_LP, 2, model.layer_ids, EXPERTS)
    held = rank_weights(source, placement, 0, 0)
    assert held.biases is not None and torch.equal(held.biases.down_SH[:3], all_biases.down_SH[[1, 1, 0]])
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    counts_S = torch.tensor([4, 0, 0, 0, 0])
    with_biases = run_experts(rows, counts_S, held.w13_S2FH, held.w2_SHF, held.biases)
    assert (with_biases - run_experts(rows, counts_S, held.w13_S2FH, held.w2_SHF)).abs().max() > 0.1
    assert source.biases_E(0) is not None and open_checkpoint(str(tmp_path), model).num_experts == EXPERTS


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    write("mixtral", folder)
    return folder


TENSOR = "model.layers.1.block_sparse_moe.experts.3.w3.weight"


def damaged(source: Path, folder: Path, change: Any, tensor: str = TENSOR) -> Path:
    """A copy of a checkpoint in which change(tensors of the shard that holds `tensor`) was applied; that shard."""
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    return shard


def read_all(folder: Path) -> None:
    model = model_from_hf_config(folder)
    source = HFCheckpoint(folder, model)
    for layer in range(model.num_moe_layers):
        source.gate_EH(layer)
        for expert in range(model.num_experts):
            source.expert(layer, expert)


def test_a_bad_tensor_is_one_error_that_names_its_file(mixtral: Path, tmp_path: Path) -> None:
    read_all(mixtral)
    cases: list[tuple[str, Any, str]] = [
        ("lost", lambda t: t.pop(TENSOR), "is missing, although model.safetensors.index.json places it there"),
        ("nan", lambda t: t[TENSOR][3, 1].fill_(float("nan")), "holds NaN or infinite values"),
        ("shape", lambda t: t.update({TENSOR: torch.zeros(24, 31)}), "has shape [24, 31]"),
        ("quantised", lambda t: t.update({TENSOR: torch.zeros(24, 32, dtype=torch.int8)}), "quantised"),
    ]
    for name, change, words in cases:
        (tmp_path / name).mkdir()
        shard = damaged(mixtral, tmp_path / name, change)
        with pytest.raises(UserError) as caught:
            read_all(tmp_path / name)
        assert f"{shard}: tensor {TENSOR} " in str(caught.value) and words in str(caught.value)


def test_shards_that_are_not_what_the_index_says_are_named(mixtral: Path, tmp_path: Path) -> None:
    """The index places a tensor in another shard; a shard is another model's, with the same names; a mark before the JSON."""
    shard = damaged(mixtral, tmp_path, lambda t: t.update({name: torch.zeros(3, 5) for name in t}))
    with pytest.raises(UserError, match=rf"{shard}: tensor .* has shape \[3, 5\]; model .* asks for \["):
        read_all(tmp_path)
    shard = damaged(mixtral, tmp_path, lambda t: None)
    whole = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_bytes(b"\xef\xbb\xbf" + json.dumps(whole, indent=1).replace("\n", "\r\n").encode())
    read_all(tmp_path)
    other = next(name for name in whole["weight_map"].values() if name != shard.name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": whole["weight_map"] | {TENSOR: other}}))
    with pytest.raises(UserError, match=rf"{tmp_path / other}: tensor {TENSOR} is missing, although {INDEX} places"):
        read_all(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(UserError, match=f"{INDEX}: holds a list, not an object"):
        read_all(tmp_path)


def test_an_incomplete_checkpoint_is_refused_before_any_weight_is_read(mixtral: Path, tmp_path: Path) -> None:
    shard = damaged(mixtral, tmp_path, lambda t: None)
    model = model_from_hf_config(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][TENSOR]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{INDEX}: tensor {TENSOR} is missing"):
        HFCheckpoint(tmp_path, model)
    index["weight_map"][TENSOR + "_blocks"] = shard.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="is in MXFP4"):
        HFCheckpoint(tmp_path, model)
    index["weight_map"][TENSOR] = shard.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match=f"{shard}: not a readable safetensors file"):
        read_all(tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard}: no such file"):
        read_all(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(UserError, match="holds neither"):
        HFCheckpoint(tmp_path, model)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="model_type 'llama'; this reader knows " + ", ".join(NAMINGS)):
        HFCheckpoint(tmp_path, model)
    with pytest.raises(UserError, match=r"needs measure\.checkpoint=FOLDER"):
        open_checkpoint(None, model)
