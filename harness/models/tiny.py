"""A Qwen3-MoE in plain torch, small enough to travel with the package and to train on two CPU cores.

Each layer:  x += attention(norm(x));  x += moe(norm(x)).  Attention: grouped queries, RMS norm on each head's query
and key, rotary positions. MoE: softmax over E gate logits, the top k renormalised to sum 1, SwiGLU experts.
Embeddings are tied.
Checkpoints carry the parameter names of Hugging Face's Qwen3MoeForCausalLM (see `checkpoint.py`).

Shape letters beyond the project's: B sequences, N query heads, K key-value heads, D head size, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from semmoe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    vocab_size: int = 4096
    hidden: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 32
    top_k: int = 4
    expert_ffn: int = 32
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"top_k={self.top_k} must lie in 1..num_experts={self.num_experts}")
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")


@dataclass
class KVCache:
    """Keys and values of the tokens so far; `length` counts them. Shapes [L, B, K, max_tokens, D]."""

    key_LBKSD: Tensor
    value_LBKSD: Tensor
    length: int = 0

    @classmethod
    def empty(cls, config: TinyConfig, batch: int = 1, max_tokens: int | None = None) -> KVCache:
        shape = (config.num_layers, batch, config.num_kv_heads, max_tokens or config.max_positions, config.head_dim)
        return cls(torch.zeros(shape), torch.zeros(shape))

    def extend(self, layer: int, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens of one layer; return all keys and values up to and including them."""
        end = self.length + key_BKTD.shape[2]
        if end > self.key_LBKSD.shape[3]:
            raise UserError(f"the KV cache holds {self.key_LBKSD.shape[3]} tokens; {end} are needed")
        self.key_LBKSD[layer, :, :, self.length : end] = key_BKTD
        self.value_LBKSD[layer, :, :, self.length : end] = value_BKTD
        return self.key_LBKSD[layer, :, :, :end], self.value_LBKSD[layer, :, :, :end]


@dataclass
class MoECapture:
    """What each MoE layer saw and chose, tokens flattened over the batch; appended to by `TinyModel.forward`."""

    hidden: list[Tensor] = field(default_factory=list)
    gate_logits: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    @property
    def hidden_LTH(self) -> Tensor:
        """Input of the MoE layers: the residual stream after the post-attention norm."""
        return torch.stack(self.hidden)

    @property
    def gate_logits_LTE(self) -> Tensor:
        return torch.stack(self.gate_logits)

    @property
    def experts_LTk(self) -> Tensor:
        return torch.stack(self.experts)

    @property
    def weights_LTk(self) -> Tensor:
        return torch.stack(self.weights)


def route(gate_logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(experts_Tk, weights_Tk): the k largest of the softmax in descending order, weights summing to 1."""
    weights_Tk, experts_Tk = gate_logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return experts_Tk, (weights_Tk / weights_Tk.sum(-1, keepdim=True)).to(gate_logits_TE.dtype)


def run_experts(x_TH: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, w13_E2FH: Tensor, w2_EHF: Tensor) -> Tensor:
    """sum over a token's experts e of weight * w2[e] @ (silu(w1[e] @ x) * (w3[e] @ x)); w13 holds w1 above w3.

    Rows are sorted by expert, so that one grouped product serves each of the two projections.
    """
    choice = experts_Tk.reshape(-1)
    order = choice.argsort(stable=True)
    token = order // experts_Tk.shape[1]
    ends_E = torch.bincount(choice, minlength=w13_E2FH.shape[0]).cumsum(0).to(torch.int32)
    gate_up = functional.grouped_mm(x_TH[token], w13_E2FH.transpose(1, 2), offs=ends_E)
    gate, up = gate_up.chunk(2, dim=-1)
    rows = functional.grouped_mm(functional.silu(gate) * up, w2_EHF.transpose(1, 2), offs=ends_E)
    return torch.zeros_like(x_TH).index_add(0, token, rows * weights_Tk.reshape(-1)[order, None])


def rotate(x_BNTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary positions; the two halves of the head are the two coordinates of each turned pair."""
    low, high = x_BNTD.chunk(2, dim=-1)
    return x_BNTD * cos_TD + torch.cat([-high, low], dim=-1) * sin_TD


def rotary_tables(config: TinyConfig, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """`rotary` of the model's heads."""
    return rotary(config.head_dim, config.rope_theta, start, tokens)


def rotary(head_dim: int, theta: float, start: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(cos_TD, sin_TD) for positions start .. start + tokens - 1."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle_TD = torch.arange(start, start + tokens, dtype=torch.float32)[:, None] * inverse.repeat(2)
    return angle_TD.cos(), angle_TD.sin()


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, query, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(query, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_eps)

    def forward(self, x_BTH: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache | None, layer: int) -> Tensor:
        heads = (*x_BTH.shape[:2], -1, self.config.head_dim)
        query = rotate(self.q_norm(self.q_proj(x_BTH).view(heads)).transpose(1, 2), *tables)
        key = rotate(self.k_norm(self.k_proj(x_BTH).view(heads)).transpose(1, 2), *tables)
        value = self.v_proj(x_BTH).view(heads).transpose(1, 2)
        mask = None
        if cache is not None and cache.length:
            new, total = key.shape[2], cache.length + key.shape[2]
            mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        shared = self.config.num_heads // self.config.num_kv_heads
        out = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(shared, 1),
            value.repeat_interleave(shared, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MoE(nn.Module):
    """Gate and stacked experts: `gate_EH`, `w13_E2FH` (gate projection above up projection), `w2_EHF`."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate_EH = nn.Parameter(torch.empty(config.num_experts, config.hidden))
        self.w13_E2FH = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_ffn, config.hidden))
        self.w2_EHF = nn.Parameter(torch.empty(config.num_experts, config.hidden, config.expert_ffn))

    def forward(self, x_TH: Tensor, capture: MoECapture | None) -> Tensor:
        gate_logits_TE = functional.linear(x_TH, self.gate_EH)
        experts_Tk, weights_Tk = route(gate_logits_TE, self.top_k)
        if capture is not None:
            capture.hidden.append(x_TH)
            capture.gate_logits.append(gate_logits_TE)
            capture.experts.append(experts_Tk)
            capture.weights.append(weights_Tk)
        return run_experts(x_TH, experts_Tk, weights_Tk, self.w13_E2FH, self.w2_EHF)


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self.attention = Attention(config)
        self.post_attention_norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self.moe = MoE(config)

    def forward(
        self,
        x_BTH: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache | None,
        layer: int,
        capture: MoECapture | None,
    ) -> Tensor:
        x_BTH = x_BTH + self.attention(self.input_norm(x_BTH), tables, cache, layer)
        moe_input_TH = self.post_attention_norm(x_BTH).flatten(0, 1)
        return x_BTH + self.moe(moe_input_TH, capture).view_as(x_BTH)


class TinyModel(nn.Module):
    def __init__(self, config: TinyConfig = TinyConfig(), seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_VH = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.rms_eps)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Normal weights of 1/sqrt(fan-in); projections into the residual stream shrink with depth, as in GPT-2."""
        depth = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # norms start at one
            scale = 0.02 if name == "embed_VH" else parameter.shape[-1] ** -0.5
            scale *= depth if name.endswith(("o_proj.weight", "w2_EHF")) else 1.0
            nn.init.normal_(parameter, std=scale, generator=generator)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None, capture: MoECapture | None = None) -> Tensor:
        """logits_BTV. With a cache, `tokens_BT` continues the sequences in it; `capture` collects the MoE layers."""
        start = cache.length if cache is not None else 0
        tables = rotary_tables(self.config, start, tokens_BT.shape[1])
        x_BTH = functional.embedding(tokens_BT, self.embed_VH)
        for index, layer in enumerate(self.layers):
            x_BTH = layer(x_BTH, tables, cache, index, capture)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return functional.linear(self.norm(x_BTH), self.embed_VH)

    def moe_tensors(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """(gate_EH, w13_E2FH, w2_EHF) of one MoE layer, without gradient: what a distributed layer shards."""
        moe = cast(Layer, self.layers[layer]).moe
        return moe.gate_EH.detach(), moe.w13_E2FH.detach(), moe.w2_EHF.detach()

    @torch.no_grad()
    def moe_inputs(self, tokens_BT: Tensor) -> MoECapture:
        """One forward; its capture holds hidden_LTH, gate_logits_LTE, experts_LTk, weights_LTk (T = B x tokens)."""
        capture = MoECapture()
        self(tokens_BT, capture=capture)
        return capture

    @torch.no_grad()
    def generate(
        self,
        prompt_BT: Tensor,
        new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        capture: MoECapture | None = None,
    ) -> Tensor:
        """Prompt and `new_tokens` more, greedy at temperature 0, else sampled. The last one is not fed back."""
        cache = KVCache.empty(self.config, prompt_BT.shape[0], prompt_BT.shape[1] + new_tokens)
        generator = torch.Generator().manual_seed(seed)
        tokens_BT, step_BT = prompt_BT, prompt_BT
        for _ in range(new_tokens):
            logits_BV = self(step_BT, cache, capture)[:, -1]
            if temperature > 0:
                step_BT = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            else:
                step_BT = logits_BV.argmax(-1, keepdim=True)
            tokens_BT = torch.cat([tokens_BT, step_BT], dim=1)
        return tokens_BT
