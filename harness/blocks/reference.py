"""Transformer blocks in one process, the plain way: every sequence by itself, nothing absorbed, fused or sharded.

The oracle of `forward.py`; it shares its seeded weights and nothing of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from semmoe.serving.stepplan import StepPlan
from semmoe.specs import ModelSpec

from .attention import ROPE_THETA
from .weights import BlockWeights

EPS = 1e-6
Matrices = dict[str, Tensor]
Experts = Callable[[Tensor], Tensor]  # normalised rows [T, H] -> what the routed experts of a layer make of them


def block(
    weights: BlockWeights,
    layer: int,
    x_TH: Tensor,
    plan: StepPlan,
    most_sequences: int,
    positions: int,
    experts: Experts | None,
) -> Tensor:
    """The residual stream behind decoder layer `layer`, fp32. x_TH: rows in the order of the plan's entries.

    most_sequences, positions: what caches are made for. experts: None in a dense layer."""
    model = weights.model
    rows_TH = norm(x_TH, weights.norm(layer, "input_norm", model.hidden))
    shape: tuple[int, ...]
    if model.attention == "gqa":
        attend, matrices = _gqa, weights.gqa(layer)
        shape = (2, most_sequences, model.num_kv_heads, positions, model.head_dim)
    else:
        attend, matrices = _mla, weights.mla(layer)
        shape = (most_sequences, positions, model.kv_lora_rank + model.rope_head_dim)
    kept_by = cache(partial(weights.cache, layer, shape=shape))
    parts, begin, place = [x_TH.new_zeros(0, model.hidden)], 0, dict[int, int]()
    for queue, start, count in zip(plan.rank_N.tolist(), plan.start_N.tolist(), plan.count_N.tolist(), strict=True):
        number = place.get(queue, 0)  # of the sequence in its queue
        place[queue] = number + 1
        own_cH = rows_TH[begin : begin + count]
        parts.append(attend(model, matrices, kept_by(queue), own_cH, start, number))
        begin += count
    x_TH = x_TH + torch.cat(parts)
    rows_TH = norm(x_TH, weights.norm(layer, "post_norm", model.hidden))
    if experts is None:
        return x_TH + _mlp(rows_TH, *weights.mlp(layer, shared=False))
    out_TH = experts(rows_TH)
    if model.shared_experts:
        out_TH = out_TH + _mlp(rows_TH, *weights.mlp(layer, shared=True))
    return x_TH + out_TH


def logits(weights: BlockWeights, x_BH: Tensor) -> Tensor:
    """[B, V] of rows behind the last block."""
    model = weights.model
    rows_BH = norm(x_BH, weights.norm(model.num_layers, "input_norm", model.hidden))
    return rows_BH @ weights.matrix(model.num_layers, "head", model.vocab_size, model.hidden).T


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def _gqa(model: ModelSpec, matrices: Matrices, kept: Tensor, x_cH: Tensor, start: int, number: int) -> Tensor:
    size = model.head_dim
    cached = kept[:, number, :, :start]
    query, key, value = ((x_cH @ matrices[name].T).view(len(x_cH), -1, size) for name in "qkv")
    query, key = turned(query, start), turned(key, start)
    shared = model.num_heads // model.num_kv_heads
    keys_NSD, values_NSD = (
        torch.cat([old, new.transpose(0, 1)], dim=1).repeat_interleave(shared, dim=0)
        for old, new in zip(cached, (key, value), strict=True)
    )
    score_NcS = torch.einsum("cnd,nsd->ncs", query, keys_NSD) / size**0.5
    out = torch.einsum("ncs,nsd->cnd", _softmax(score_NcS, start), values_NSD)
    return out.reshape(len(x_cH), -1) @ matrices["o"].T


def _mla(model: ModelSpec, matrices: Matrices, kept: Tensor, x_cH: Tensor, start: int, number: int) -> Tensor:
    latent, size, rope = model.kv_lora_rank, model.head_dim, model.rope_head_dim
    row = x_cH @ matrices["kv_down"].T
    row_cO = torch.cat([norm(row[:, :latent], matrices["kv_norm"]), turned(row[:, None, latent:], start)[:, 0]], dim=1)
    cached_SO = kept[number, :start]
    row_SO = torch.cat([cached_SO, row_cO])
    asked = norm(x_cH @ matrices["q_down"].T, matrices["q_norm"]) if "q_down" in matrices else x_cH
    query = (asked @ matrices["q"].T).view(len(x_cH), model.num_heads, size + rope)
    query = torch.cat([query[..., :size], turned(query[..., size:], start)], dim=2)
    k_up, v_up = (matrices[name].view(model.num_heads, -1, latent) for name in ("k_up", "v_up"))
    keys_NSD = torch.einsum("sc,ndc->nsd", row_SO[:, :latent], k_up)
    rope_NSR = row_SO[None, :, latent:].expand(model.num_heads, -1, -1)
    values_NSV = torch.einsum("sc,nvc->nsv", row_SO[:, :latent], v_up)
    score_NcS = torch.einsum("cnd,nsd->ncs", query, torch.cat([keys_NSD, rope_NSR], dim=2)) / (size + rope) ** 0.5
    out = torch.einsum("ncs,nsv->cnv", _softmax(score_NcS, start), values_NSV)
    return out.reshape(len(x_cH), -1) @ matrices["o"].T


def turned(x_cND: Tensor, start: int) -> Tensor:
    """Rotary positions start, start + 1, ...: element i and i + D / 2 are the coordinates of a turned pair."""
    half = x_cND.shape[2] // 2
    position_c = torch.arange(start, start + len(x_cND), dtype=torch.float32)
    angle = position_c[:, None, None] * ROPE_THETA ** (-torch.arange(half) / half)
    low, high = x_cND[..., :half], x_cND[..., half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=2)


def _softmax(score_NcS: Tensor, start: int) -> Tensor:
    """Causal: new token i sees positions 0..start + i."""
    _, new, positions = score_NcS.shape
    seen = torch.arange(positions)[None] <= start + torch.arange(new)[:, None]
    return score_NcS.masked_fill(~seen, -torch.inf).softmax(dim=2)


def _mlp(x_TH: Tensor, gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor) -> Tensor:
    return (silu(x_TH @ gate_FH.T) * (x_TH @ up_FH.T)) @ down_HF.T
