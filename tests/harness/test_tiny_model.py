"""The tiny model is what transformers would build from its files, and its checkpoint, text and training behave."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semmoe.errors import UserError
from semmoe.trace import RoutingTrace

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from harness.models import train as training  # noqa: E402
from harness.models.checkpoint import TINY_DIR, load_model, save_model, to_disk_names  # noqa: E402
from harness.models.corpus import DOMAINS, is_held_out, load_corpus, separate, stdlib_files  # noqa: E402
from harness.models.recall import token_recall  # noqa: E402
from harness.models.record_tiny import TRACE_PATH, record_tiny  # noqa: E402
from harness.models.tiny import KVCache, MoECapture, TinyConfig, TinyModel  # noqa: E402
from harness.models.tokenizer import load_tokenizer  # noqa: E402

SMALL = TinyConfig(
    vocab_size=64,
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=6,
    top_k=2,
    expert_ffn=8,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on busy cores make operations this small ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bundled() -> TinyModel:
    return load_model()


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    save_model(TinyModel(SMALL, seed=1), tmp_path / "small", dtype=torch.float32)
    return tmp_path / "small"


def transformers_model(folder: Path) -> Any:
    """The same folder through transformers, in fp32; every tensor must have found its place."""
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("which", ["bundled", "small"])
def test_transformers_loads_the_checkpoint_and_gives_the_same_logits(which: str, small_folder: Path) -> None:
    folder = TINY_DIR if which == "bundled" else small_folder
    model = load_model(folder)
    tokens_BT = torch.randint(0, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT), transformers_model(folder)(tokens_BT).logits, atol=1e-4, rtol=1e-4)


def test_the_route_recorder_sees_the_routes_of_the_plain_torch_forward(small_folder: Path) -> None:
    from semmoe.sources.huggingface import record

    tokens = [3, 60, 7, 7, 21, 40, 11]
    trace = record(transformers_model(small_folder), [tokens], gate_weights=True)
    capture = load_model(small_folder).moe_inputs(torch.tensor([tokens]))
    np.testing.assert_array_equal(trace.experts_TLk, capture.experts_LTk.permute(1, 0, 2).numpy())
    np.testing.assert_allclose(trace.gate_weight_TLk, capture.weights_LTk.permute(1, 0, 2).numpy(), atol=1e-3)


def test_bundled_checkpoint_is_small_and_readable_by_everyone() -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        path = TINY_DIR / name
        assert path.stat().st_mode & stat.S_IROTH, f"{path} is private to its owner"
    assert (TINY_DIR / "model.safetensors").stat().st_size <= 8_000_000


def test_prefill_and_decode_through_the_cache_equal_one_forward() -> None:
    model = TinyModel(SMALL, seed=2)
    tokens_BT = torch.randint(0, 64, (3, 12))
    cache = KVCache.empty(SMALL, batch=3, max_tokens=12)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens_BT.split([5, 4, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BT), atol=1e-5, rtol=1e-5)
        with pytest.raises(UserError, match="holds 12 tokens; 13 are needed"):
            model(tokens_BT[:, :1], cache)


def test_captured_inputs_and_moe_tensors_reproduce_routes_and_layer_output() -> None:
    model = TinyModel(SMALL, seed=3)
    outputs: list[Any] = []
    hook = model.layers[1].moe.register_forward_hook(lambda _, args, output: outputs.append(output))
    capture = model.moe_inputs(torch.randint(0, 64, (2, 9)))
    hook.remove()
    assert capture.hidden_LTH.shape == (2, 18, 16) and capture.experts_LTk.shape == (2, 18, 2)
    gate_EH, w13_E2FH, w2_EHF = model.moe_tensors(1)
    x_TH = capture.hidden_LTH[1]
    torch.testing.assert_close(x_TH @ gate_EH.T, capture.gate_logits_LTE[1])
    weight_TE = (x_TH @ gate_EH.T).softmax(-1)
    weight_TE = weight_TE * (weight_TE >= weight_TE.topk(2).values[:, -1:])
    weight_TE = weight_TE / weight_TE.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,efh->tef", x_TH, w13_E2FH).chunk(2, -1)  # every token through every expert
    dense_TEH = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w2_EHF)
    torch.testing.assert_close(torch.einsum("te,teh->th", weight_TE, dense_TEH), outputs[0], atol=1e-5, rtol=1e-4)


def test_greedy_generation_follows_the_argmax_and_sampling_repeats_with_its_seed() -> None:
    model = TinyModel(SMALL, seed=4)
    prompt_BT = torch.randint(0, 64, (2, 5))
    capture = MoECapture()
    tokens_BT = model.generate(prompt_BT, 4, capture=capture)
    with torch.no_grad():
        assert torch.equal(model(tokens_BT)[:, 4:-1].argmax(-1), tokens_BT[:, 5:])
    assert sum(len(part) for part in capture.experts) == SMALL.num_layers * 2 * (5 + 3)
    first, again, other = (model.generate(prompt_BT, 8, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def damage(folder: Path, change: Any) -> Path:
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path)
    return path


DOWN = "model.layers.1.mlp.experts.4.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors[DOWN].view(-1)[3:4].fill_(float("nan")), "holds NaN"),
        (lambda tensors: tensors.pop(DOWN), "is missing"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(16, 9)}), r"has shape \[16, 9\]"),
    ],
)
def test_a_damaged_tensor_is_one_error_naming_file_and_tensor(small_folder: Path, change: Any, complaint: str) -> None:
    path = damage(small_folder, change)
    with pytest.raises(UserError, match=complaint) as caught:
        load_model(small_folder)
    assert str(path) in str(caught.value) and DOWN in str(caught.value)


def test_an_undamaged_checkpoint_loads_to_the_tensors_that_were_saved(small_folder: Path) -> None:
    saved, loaded = to_disk_names(TinyModel(SMALL, seed=1)), to_disk_names(load_model(small_folder))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_unreadable_files_and_other_models_are_clear_errors(small_folder: Path) -> None:
    with open(small_folder / "model.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(small_folder)
    (small_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: no such file"):
        load_model(small_folder)
    config = json.loads((small_folder / "config.json").read_text())
    (small_folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(UserError, match="model_type 'llama'"):
        load_model(small_folder)
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        load_model(small_folder / "nowhere")


def test_impossible_sizes_are_refused() -> None:
    for wrong in ({"top_k": 7}, {"num_kv_heads": 3}, {"head_dim": 7}):
        with pytest.raises(UserError):
            replace(SMALL, **wrong)


def test_source_and_docstrings_are_told_apart_and_comments_dropped() -> None:
    texts = separate(
        '"""Top."""\n# note\ndef f(x):\n    """Inner doc."""\n    return x  # why\n\nclass A:\n    "Only doc"\n'
    )
    assert texts["docstrings"].split("\n\n") == ["Top.", "Inner doc.", "Only doc"]
    assert texts["source"] == "def f(x):\n    return x\n\nclass A:\n    pass"


def test_held_out_files_are_a_tenth_and_do_not_depend_on_the_other_files(tmp_path: Path) -> None:
    files = stdlib_files()
    share = np.mean([is_held_out(path, 0.1, 0) for path in files])
    assert 0.07 < share < 0.13
    held_out = {document.name for document in load_corpus("held_out")}
    assert all(is_held_out(Path(name), 0.1, 0) for name in held_out)
    assert not any("test" in Path(name).parts or "site-packages" in Path(name).parts for name in held_out)
    (tmp_path / "new_module.py").write_text("value = 1\n" * 40)
    parts = [load_corpus(part, root=tmp_path) for part in ("train", "held_out")]
    assert sum(map(len, parts)) == 1, "a file is in one part only"


def test_tokenizer_round_trips_any_text_within_the_vocabulary() -> None:
    tokenizer = load_tokenizer()
    text = "def naïve(x):\n\treturn 'Straße 東京 🙂' + x\x00"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == load_model().config.vocab_size > max(ids)
    assert tokenizer.token_to_id("<|endoftext|>") == 0


def small_run(steps: range, model: TinyModel, optimiser: Any, options: training.TrainOptions) -> list[float]:
    """Losses of training on a stream in which every token is followed by the next id."""
    stream = np.arange(4000) % 64
    losses = []
    for step in steps:
        batch = training.draw_batch([stream], 4, 32, np.random.default_rng(step))
        losses.append(training.train_step(model, optimiser, batch, options)[0])
    return losses


def test_training_lowers_the_loss_and_a_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    options = training.TrainOptions(learning_rate=1e-2)
    model = TinyModel(SMALL)
    optimiser = training.make_optimiser(model, options)
    losses = small_run(range(40), model, optimiser, options)
    assert losses[-1] < 0.5 * losses[0]

    broken = TinyModel(SMALL)
    first_optimiser = training.make_optimiser(broken, options)
    small_run(range(20), broken, first_optimiser, options)
    training.save_state(tmp_path / "state.pt", broken, first_optimiser, 20)
    resumed = TinyModel(SMALL, seed=9)
    second_optimiser = training.make_optimiser(resumed, options)
    assert training.load_state(tmp_path / "state.pt", resumed, second_optimiser) == 20
    assert small_run(range(20, 40), resumed, second_optimiser, options) == pytest.approx(losses[20:], rel=1e-4)


def test_balance_loss_is_one_when_balanced_and_grows_when_one_expert_takes_all() -> None:
    even_TE = torch.zeros(8, 4)
    even_Tk = torch.arange(8)[:, None] % 4
    assert float(training.balance_loss(even_TE, even_Tk)) == pytest.approx(1.0)
    crowded_TE = torch.tensor([[20.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    assert float(training.balance_loss(crowded_TE, torch.zeros(8, 1, dtype=torch.long))) == pytest.approx(4.0, rel=1e-3)


def test_token_recall_is_perfect_for_routes_fixed_by_the_token_and_falls_when_they_are_shuffled() -> None:
    rng = np.random.default_rng(0)
    table_VLk = rng.permuted(np.tile(np.arange(16), (50, 2, 1)), axis=2)[:, :, :3]
    train_T, test_T = rng.integers(0, 50, 4000), rng.integers(0, 50, 1000)
    sizes = {"vocab_size": 50, "num_experts": 16}
    assert token_recall(train_T, table_VLk[train_T], test_T, table_VLk[test_T], **sizes) == [1.0, 1.0]
    shuffled = token_recall(train_T, table_VLk[train_T], rng.permutation(test_T), table_VLk[test_T], **sizes)
    assert max(shuffled) < 0.3
    seen_T, unseen_T = np.zeros(9, int), np.full(9, 40)
    popular = token_recall(seen_T, table_VLk[seen_T], unseen_T, table_VLk[seen_T], **sizes)
    assert popular == [1.0, 1.0], "an unseen token id falls back to the popular experts"


def test_bundled_trace_holds_the_routes_that_the_bundled_model_takes(bundled: TinyModel) -> None:
    trace = RoutingTrace.load(TRACE_PATH)
    assert TRACE_PATH.stat().st_size <= 1_500_000
    assert (trace.num_experts, trace.vocab_size, trace.top_k) == (32, 4096, 4)
    counts = {domain: int((trace.domain_R == domain).sum()) for domain in DOMAINS}
    assert counts["source"] == counts["docstrings"] == trace.num_requests // 2
    same = []
    for request in range(0, trace.num_requests, 20):
        part = trace.select(np.array([request]))
        capture = bundled.moe_inputs(torch.from_numpy(part.token_id_T).long()[None])
        expected = np.sort(capture.experts_LTk.permute(1, 0, 2).numpy(), axis=2)
        same.append((np.sort(part.experts_TLk, axis=2) == expected).mean())
    assert np.mean(same) > 0.999, "another processor may flip a rare near-tie, no more"


def test_recording_is_repeatable_by_seed_and_refuses_more_than_the_unseen_text_gives(tmp_path: Path) -> None:
    first = record_tiny(tmp_path / "a.npz", requests=6, tokens=16, seed=1, gate_weights=True)
    again = RoutingTrace.load(tmp_path / "a.npz")
    assert first.digest == again.digest == record_tiny(tmp_path / "b.npz", requests=6, tokens=16, seed=1).digest
    assert first.digest != record_tiny(tmp_path / "c.npz", requests=6, tokens=16, seed=2).digest
    assert first.domain_R.tolist() == ["source", "docstrings"] * 3
    assert (first.token_id_T[first.request_offset_R1[:-1]] == 0).all(), "every request opens with the end-of-text token"
    np.testing.assert_allclose(again.gate_weight_TLk.sum(-1), 1.0, atol=2e-3)
    with pytest.raises(UserError, match="unseen text gives"):
        record_tiny(tmp_path / "d.npz", requests=10_000, tokens=192)
