"""A stack of transformer blocks on several ranks gives what the same stack gives in one process, in every flow."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from block_cases import FLOWS, FORMS, MODELS, Spoil, Stack, errors_by_kernels, no_residual, other_norm, wrong_heads
from kernel_cases import on_rank_zero
from rank_processes import rank_processes

from harness.blocks.head_shard import HeadShard
from semmoe.errors import UserError


@pytest.fixture(autouse=True, scope="module")
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("flow", "ranks", "kind"), list(itertools.product(FLOWS, (1, 2, 4), MODELS)))
def test_the_stack_on_ranks_is_that_of_one_process(flow: str, ranks: int, kind: str) -> None:
    for tokens, form in itertools.product((0, 1, 7, 64), FORMS.values()):
        errors = Stack(flow, ranks, tokens, MODELS[kind], form).errors()
        assert max(errors) <= 1e-5, (tokens, form, errors)


@pytest.mark.parametrize("spoil", [wrong_heads, no_residual])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_wrong_head_or_a_missing_residual_shows(flow: str, spoil: Spoil) -> None:
    for kind, form in (("gqa", "prefill"), ("mla", "decode")):
        assert max(Stack(flow, 2, 7, MODELS[kind], FORMS[form]).errors(spoil)) > 1e-3, (kind, form)


def test_triton_kernels_in_a_stack_give_the_same_and_a_wrong_norm_shows() -> None:
    """In the interpreter: SRS sums, adds the residual and normalises in one launch, and the next block gets SAG's rows."""
    pytest.importorskip("triton")
    shuffled = Stack("tp_shuffled", 2, 7, MODELS["gqa"], FORMS["prefill"], "triton")
    right = [(replace(shuffled, flow=flow), None) for flow in ("tp_shuffled", "tp_replicated", "dp")]
    errors = rank_processes().run(on_rank_zero, errors_by_kernels, ([*right, (shuffled, other_norm)],))[0]
    assert max(errors[:-1]) <= 1e-5, errors
    assert errors[-1] > 1e-3, errors


def test_heads_that_cannot_be_shared_are_refused() -> None:
    model = MODELS["gqa"]
    with pytest.raises(UserError, match="4 attention heads cannot be split over ep_size=3"):
        HeadShard(model, 0, 3)
    assert [HeadShard(model, r, 4).kv_heads.start for r in range(4)] == [0, 0, 1, 1]
