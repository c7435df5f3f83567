"""The plain operations: gate, experts, packing, weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.reference.experts import experts_grouped, experts_loop, grouped_available, moe_reference
from harness.reference.gate import Gating
from harness.reference.permute import counts_by_sender, pack, unpack_meta
from harness.weights import RandomWeights, TinyWeights, rank_weights
from semmoe.errors import UserError
from semmoe.placement.base import Placement
from semmoe.specs import ModelSpec

MODEL = ModelSpec(
    name="toy",
    hidden=64,
    num_layers=3,
    layer_ids=(1, 2),
    num_experts=6,
    top_k=2,
    expert_ffn=48,
    vocab_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_softmax_gate_takes_the_largest_probabilities_and_renormalises_when_asked() -> None:
    logits_TE = normal(5, 8)
    probability_TE = np.exp(logits_TE.numpy()) / np.exp(logits_TE.numpy()).sum(1, keepdims=True)
    expected_Tk = np.argsort(-probability_TE, axis=1)[:, :3]
    for renormalise in (True, False):
        gating = Gating(top_k=3, renormalise=renormalise)
        score = gating.scores(logits_TE)
        experts_Tk = gating.choose(score)
        assert np.array_equal(experts_Tk.numpy(), expected_Tk)
        weights = np.take_along_axis(probability_TE, expected_Tk, 1)
        weights = weights / weights.sum(1, keepdims=True) if renormalise else weights
        np.testing.assert_allclose(gating.weights(score, experts_Tk), weights, rtol=1e-5)


def test_sigmoid_gate_chooses_with_the_bias_and_weighs_without_it() -> None:
    gating = Gating(top_k=1, scoring="sigmoid", renormalise=False)
    score_TE = gating.scores(torch.tensor([[2.0, 1.0, 0.0]]))
    bias_E = torch.tensor([0.0, 0.5, 0.0])
    chosen = gating.choose(score_TE, bias_E)
    assert chosen.tolist() == [[1]]
    assert gating.weights(score_TE, chosen).item() == pytest.approx(1 / (1 + np.exp(-1.0)))


def test_grouped_gate_stays_inside_the_best_groups() -> None:
    logits_TE = torch.tensor([[9.0, -9, 3, 3, 8, -9, 1, 1]])  # groups of two
    score = Gating(top_k=2, scoring="sigmoid").scores(logits_TE)
    by_sum = Gating(top_k=2, scoring="sigmoid", n_group=4, topk_group=1).choose(score)
    assert sorted(by_sum[0].tolist()) == [2, 3]  # the best pair, though both best experts stand elsewhere
    by_best = Gating(top_k=2, n_group=4, topk_group=2)
    assert sorted(by_best.choose(by_best.scores(logits_TE))[0].tolist()) == [0, 4]


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(UserError, match="must be 'softmax' or 'sigmoid'"):
        Gating(top_k=1, scoring="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_and_loop_agree_with_idle_experts(dtype: torch.dtype) -> None:
    rows, w13, w2 = normal(11, 32).to(dtype), normal(5, 32, 32, seed=1).to(dtype), normal(5, 32, 16, seed=2).to(dtype)
    counts = [4, 0, 6, 0, 1]
    if not grouped_available(rows, w2):
        pytest.skip("this torch has no F.grouped_mm")
    loop = experts_loop(rows, counts, w13, w2)
    grouped = experts_grouped(rows, torch.tensor(counts), w13, w2)
    error = (loop.float() - grouped.float()).norm() / loop.float().norm()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_grouped_product_is_not_tried_on_unaligned_rows() -> None:
    assert not grouped_available(torch.zeros(1, 6), torch.zeros(1, 6, 16))
    assert not grouped_available(torch.zeros(1, 16), torch.zeros(1, 16, 6))


def test_reference_layer_by_hand() -> None:
    """One-dimensional experts: expert e maps x to silu(x) * x * (e + 1)."""
    w13, w2 = torch.ones(3, 2, 1), torch.arange(1.0, 4)[:, None, None]
    x = torch.tensor([[2.0], [-1.0]])
    out = moe_reference(x, torch.tensor([[0, 2], [1, 0]]), torch.tensor([[0.5, 0.25], [1.0, 0.0]]), w13, w2)
    base = torch.nn.functional.silu(x) * x
    torch.testing.assert_close(out, base * torch.tensor([[0.5 * 1 + 0.25 * 3], [2.0]]))


def test_packing_by_hand() -> None:
    """Rank 0 of 2 with two slots each, tokens with slots [3, 0, 2] and [1, 1, 3]: the docstring's example and one more."""
    packing = pack(torch.tensor([[3, 0, 2], [1, 1, 3]]), torch.arange(6.0).view(2, 3), 2, 0, 2)
    assert packing.local_token_A.tolist() == [0, 1, 1]
    assert packing.local_slot_A.tolist() == [0, 1, 1]
    assert packing.local_weight_A.tolist() == [1, 3, 4]
    assert packing.local_pairs == 2
    assert packing.remote_meta_A2[:, 0].tolist() == [~3, 2, ~3]
    assert (packing.send_assignments_G, packing.send_pairs_G) == ([0, 3], [0, 2])
    slot, weight, first = unpack_meta(packing.remote_meta_A2, 2)
    assert slot.tolist() == [1, 0, 1] and weight.tolist() == [0, 2, 5] and first.tolist() == [True, False, True]
    assert counts_by_sender(first, [1, 2]) == [1, 1]


def test_an_expert_has_the_same_weights_wherever_it_stands() -> None:
    source = RandomWeights(MODEL, seed=3)
    table = np.array([[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]], dtype=np.int32)
    for layer in range(2):
        placement = Placement(table, 3, MODEL.layer_ids, 6)
        other = Placement(table[:, ::-1].copy(), 2, MODEL.layer_ids, 6)
        for p, expert in enumerate(table[layer]):
            here = rank_weights(source, placement, layer, p // 2)
            q = int(np.flatnonzero(other.physical_to_logical_LP[layer] == expert)[0])
            there = rank_weights(source, other, layer, q // 3)
            assert torch.equal(here.w13_S2FH[p % 2], there.w13_S2FH[q % 3])
            assert torch.equal(here.w2_SHF[p % 2], there.w2_SHF[q % 3])
    assert not torch.equal(source.expert(0, 1)[0], source.expert(1, 1)[0])
    assert not torch.equal(source.expert(0, 1)[0], source.expert(0, 2)[0])
    assert not torch.equal(source.expert(0, 1)[0], RandomWeights(MODEL, seed=4).expert(0, 1)[0])


def test_weights_shrink_by_the_scale_and_empty_slots_are_zero() -> None:
    source = RandomWeights(MODEL, scale=0.5)
    assert (source.hidden, source.ffn) == (32, 32)  # 24 rounds to the multiple of 16
    placement = Placement(np.array([[0, 1, 2, 3, 4, 5, -1, 0]] * 2, dtype=np.int32), 2, MODEL.layer_ids, 6)
    weights = rank_weights(source, placement, 0, 1)
    assert weights.w13_S2FH.shape == (4, 64, 32) and weights.gate_EH.shape == (6, 32)
    assert not weights.w13_S2FH[2].any() and weights.w13_S2FH[3].any()
    with pytest.raises(UserError, match="must lie in"):
        RandomWeights(MODEL, scale=2.0)
    with pytest.raises(UserError, match="placement of 6 experts"):
        rank_weights(_Four(), placement, 0, 0)


class _Four:
    hidden, num_experts = 8, 4

    def gate_EH(self, layer: int) -> torch.Tensor:
        return torch.zeros(4, 8)

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2, 8), torch.zeros(8, 1)


def test_the_tiny_model_gives_its_own_weights() -> None:
    source = TinyWeights()
    gate_EH, w13_E2FH, w2_EHF = source.model.moe_tensors(2)
    assert torch.equal(source.gate_EH(2), gate_EH)
    assert torch.equal(source.expert(2, 5)[0], w13_E2FH[5]) and torch.equal(source.expert(2, 5)[1], w2_EHF[5])
    assert source.hidden == gate_EH.shape[1] and source.num_experts == gate_EH.shape[0]
