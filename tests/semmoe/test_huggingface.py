"""Routes recorded through transformers are the routes that the model took, for every family and both router styles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from semmoe.errors import UserError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from semmoe.sources.huggingface import record  # noqa: E402

today = pytest.mark.skipif(transformers.__version__ < "5", reason="takes the blocks of transformers 5 apart")
VOCAB, EXPERTS, TOP_K = 61, 8, 3
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v2_grouped": (
        "DeepseekV2Config",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**COMMON, "num_experts": EXPERTS, "moe_intermediate_size": 8, "norm_topk_prob": True, "head_dim": 8},
    ),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": EXPERTS}),
    "olmoe": ("OlmoeConfig", {**COMMON, "num_experts": EXPERTS, "norm_topk_prob": False}),
    "gpt_oss": ("GptOssConfig", {**COMMON, "num_local_experts": EXPERTS, "head_dim": 8}),
}
REQUESTS = [[5, 9, 1, 44, 60, 3, 3, 17], [2, 7, 30], [59, 58, 57, 1, 2, 3, 4, 5, 6, 11, 23]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores make models this small many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(family: str) -> Any:
    """A tiny random model whose gates are wide enough that no two experts tie."""
    name, settings = FAMILIES[family]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.bias")):
                parameter.normal_()
    return model


def gates(model: Any) -> dict[int, tuple[Any, Any]]:
    """Decoder layer -> (MoE block, router), found by attribute and not by the recorder's search."""
    parts = {i: getattr(layer, "block_sparse_moe", None) or layer.mlp for i, layer in enumerate(model.model.layers)}
    blocks = {i: block for i, block in parts.items() if hasattr(block, "experts")}
    return {i: (block, getattr(block, "gate", None) or block.router) for i, block in blocks.items()}


def independent_routes(model: Any, family: str, request: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(experts [T, L, k], probabilities [T, L, E]) from the block's input and the gate's weights alone."""
    inputs: dict[int, Any] = {}
    handles = [
        block.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args[0].flatten(0, -2)))
        for i, (block, _) in gates(model).items()
    ]
    with torch.no_grad():
        model(torch.tensor([request]))
    for handle in handles:
        handle.remove()
    experts, scores = [], []
    for i, (_, router) in gates(model).items():
        logits_TE = inputs[i].double() @ router.weight.double().T
        logits_TE = logits_TE + router.bias.double() if getattr(router, "bias", None) is not None else logits_TE
        score_TE = logits_TE.softmax(-1).detach().numpy()
        allowed_TE = np.ones_like(score_TE, dtype=bool)
        if family == "deepseek_v2_grouped":  # the two of four groups with the best single expert
            best_TG = score_TE.reshape(len(score_TE), 4, -1).max(-1)
            open_TG = best_TG >= np.sort(best_TG, axis=1)[:, -2:-1]
            allowed_TE = np.repeat(open_TG, EXPERTS // 4, axis=1)
        experts.append(np.argsort(-np.where(allowed_TE, score_TE, -1), axis=1, kind="stable")[:, :TOP_K])
        scores.append(score_TE)
    return np.stack(experts, 1), np.stack(scores, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routes_equal_an_independent_top_k_of_the_gate_input(family: str) -> None:
    model = build(family)
    trace = record(model, REQUESTS, ["a", "b", "a"], gate_weights=True)
    expected = [independent_routes(model, family, request) for request in REQUESTS]
    np.testing.assert_array_equal(trace.experts_TLk, np.concatenate([experts for experts, _ in expected]))
    assert trace.layer_ids_L.tolist() == ([1, 2] if family.startswith("deepseek") else [0, 1, 2])
    assert (trace.num_experts, trace.vocab_size, trace.top_k) == (EXPERTS, VOCAB, TOP_K)
    assert trace.prompt_len_R.tolist() == [len(request) for request in REQUESTS]
    assert trace.token_id_T.tolist() == [token for request in REQUESTS for token in request]
    assert trace.domain_R.tolist() == ["a", "b", "a"]
    score_TLk = np.take_along_axis(np.concatenate([s for _, s in expected]), trace.experts_TLk.astype(int), 2)
    if family in ("qwen3_moe", "mixtral", "gpt_oss"):  # these three renormalise over the chosen
        score_TLk /= score_TLk.sum(-1, keepdims=True)
    np.testing.assert_allclose(trace.gate_weight_TLk, score_TLk, atol=2e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_recorded_routes_equal_those_of_transformers_own_router_logits(family: str) -> None:
    model = build(family)
    request = REQUESTS[2]
    trace = record(model, [request])
    with torch.no_grad():
        logits_LTE = torch.stack(model(torch.tensor([request]), output_router_logits=True).router_logits)
    assert torch.equal(logits_LTE.topk(TOP_K).indices.permute(1, 0, 2), torch.from_numpy(trace.experts_TLk).long())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_plain_linear_gate_gives_the_same_routes_as_a_router_module(family: str) -> None:
    model = build(family)
    expected = record(model, REQUESTS, gate_weights=True)
    for block, router in gates(model).values():
        block.gate = LinearGate(router)
    actual = record(model, REQUESTS, gate_weights=True)
    np.testing.assert_array_equal(actual.experts_TLk, expected.experts_TLk)
    np.testing.assert_allclose(actual.gate_weight_TLk, expected.gate_weight_TLk, atol=1e-3)


@today
def test_old_gpt_oss_routers_with_scattered_scores_give_the_same_weights() -> None:
    model = build("gpt_oss")
    expected = record(model, REQUESTS, gate_weights=True)
    for block, router in gates(model).values():
        block.router = ScatteredRouter(router)
    actual = record(model, REQUESTS, gate_weights=True)
    np.testing.assert_array_equal(actual.experts_TLk, expected.experts_TLk)
    np.testing.assert_allclose(actual.gate_weight_TLk, expected.gate_weight_TLk, atol=1e-3)


def test_generated_tokens_are_recorded_as_outputs_with_the_routes_of_a_full_forward() -> None:
    model = build("qwen3_moe")
    trace = record(model, REQUESTS, max_new_tokens=5)
    assert trace.prompt_len_R.tolist() == [len(request) for request in REQUESTS]
    assert trace.length_R.tolist() == [len(request) + 4 for request in REQUESTS]
    whole = np.split(trace.token_id_T, trace.request_offset_R1[1:-1])
    again = record(model, [request.tolist() for request in whole], prompt_len=trace.prompt_len_R.tolist())
    np.testing.assert_array_equal(again.experts_TLk, trace.experts_TLk)
    ids = torch.from_numpy(whole[1].astype(np.int64))
    with torch.no_grad():
        greedy = model(ids[None]).logits[0].argmax(-1)
    assert greedy[len(REQUESTS[1]) - 1 : -1].tolist() == ids[len(REQUESTS[1]) :].tolist()


def test_sampling_repeats_with_its_seed_and_changes_with_another() -> None:
    model = build("mixtral")
    first, again, other = (record(model, REQUESTS, max_new_tokens=6, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first.digest == again.digest != other.digest


def test_hooks_are_gone_and_the_mode_is_restored_after_recording() -> None:
    model = build("olmoe").train()
    record(model, REQUESTS)
    assert model.training
    assert not any(router._forward_hooks for _, router in gates(model).values())


def test_a_checkpoint_folder_gives_the_same_trace_as_the_loaded_model(tmp_path: Any) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "tiny")
    trace = record(tmp_path / "tiny", REQUESTS)
    assert trace.digest == record(model, REQUESTS, name="tiny").digest


def test_a_model_without_experts_is_refused_by_name() -> None:
    dense = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**{**COMMON, "head_dim": 8, "num_hidden_layers": 1})
    )
    with pytest.raises(UserError, match="Qwen3ForCausalLM is no mixture-of-experts model"):
        record(dense, REQUESTS)


@today
def test_a_router_that_was_bypassed_is_noticed() -> None:
    model = build("mixtral")
    block, router = gates(model)[1]
    block.gate.forward = router.forward
    block.forward = lambda hidden: hidden  # a fused kernel that never calls the router
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.gate saw 0 of 8 tokens"):
        record(model, REQUESTS)


def test_a_linear_gate_of_a_grouped_model_is_refused_rather_than_guessed() -> None:
    model = build("mixtral")
    model.config.n_group = 2
    for block, router in gates(model).values():
        block.gate = LinearGate(router)
    with pytest.raises(UserError, match="does not choose by softmax and top k"):
        record(model, REQUESTS)


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "no requests"),
        ([[1], []], {}, "request 1 has no tokens"),
        ([[1, VOCAB]], {}, "outside 0..60"),
        ([[1, 2]], {"prompt_len": [1], "max_new_tokens": 2}, "known outputs"),
    ],
)
def test_bad_requests_are_refused(requests: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        record(build("mixtral"), requests, **options)


def test_a_folder_without_a_model_is_a_clear_error(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="transformers cannot load this model"):
        record(tmp_path, REQUESTS)


def test_the_module_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, semmoe.sources.huggingface; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class LinearGate(torch.nn.Linear):
    """The gate of transformers 4: logits to whoever looks at it, while the block gets what today's block needs."""

    def __init__(self, router: Any) -> None:
        super().__init__(router.weight.shape[1], router.weight.shape[0], bias=False)
        self.weight = router.weight
        self._router = [router]  # a list, so that the hidden router is no submodule

    def __call__(self, hidden_TH: Any) -> Any:
        super().__call__(hidden_TH)  # hooks see logits [T, E]
        return self._router[0].forward(hidden_TH)


class ScatteredRouter(torch.nn.Module):
    """GPT-OSS before transformers 5: (scores scattered over all experts, chosen ids)."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._router = [router]

    def forward(self, hidden_TH: Any) -> Any:
        logits_TE, weights_Tk, experts_Tk = self._router[0].forward(hidden_TH)
        return torch.zeros_like(logits_TE).scatter_(1, experts_Tk, weights_Tk), experts_Tk

    def __call__(self, hidden_TH: Any) -> Any:
        scores_TE, experts_Tk = super().__call__(hidden_TH)
        return scores_TE, scores_TE.gather(1, experts_Tk), experts_Tk
