"""Seeded random weights of whole transformer blocks, in a model's shape: the same on every rank, which keeps its share.

Matrices are normal with variance 1 / fan-in, norms lie around one (so that a forgotten norm shows). `layer` counts decoder
layers from 0, dense ones too; `layer` = num_layers is what follows the last.

Letters beyond the project's: N query heads, K key-value heads, D head size, R rotary part and C latent row (MLA), V value
size (MLA) or vocabulary, F width of a feed-forward.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from semmoe.specs import ModelSpec

POOL = 1_048_573  # values that caches repeat: a prime, so that no two sequences get the same

NAMES = (
    "input_norm", "post_norm", "q", "q_down", "q_norm", "k", "v", "kv_down", "kv_norm", "k_up", "v_up", "o", "up_gate", "up",
    "down", "shared_up_gate", "shared_up", "shared_down", "head",
)  # fmt: skip


@lru_cache(1)
def _pool(seed: int) -> Tensor:
    return torch.randn(POOL, generator=torch.Generator().manual_seed(seed))


class BlockWeights:
    """fp32 matrices [out, in], made when asked for."""

    def __init__(self, model: ModelSpec, seed: int = 0) -> None:
        self.model, self.seed = model, seed

    def norm(self, layer: int, name: str, size: int) -> Tensor:
        return 1.0 + 0.1 * self._normal(layer, name, (size,))

    def matrix(self, layer: int, name: str, rows: int, columns: int) -> Tensor:
        return self._normal(layer, name, (rows, columns)) / columns**0.5

    def gqa(self, layer: int) -> dict[str, Tensor]:
        """q [N D, H], k and v [K D, H], o [H, N D]."""
        model = self.model
        query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        sizes = {"q": (query, model.hidden), "k": (kv, model.hidden), "v": (kv, model.hidden)}
        return {name: self.matrix(layer, name, *size) for name, size in (sizes | {"o": (model.hidden, query)}).items()}

    def mla(self, layer: int) -> dict[str, Tensor]:
        """q [N (D + R), H] (of q_down [Q, H] where the model has one), kv_down [C + R, H], k_up [N D, C], v_up [N V, C],
        o [H, N V], and norms of what the down projections give."""
        model, heads = self.model, self.model.num_heads
        latent, query = model.kv_lora_rank, heads * (model.head_dim + model.rope_head_dim)
        made = {"q": self.matrix(layer, "q", query, model.q_lora_rank or model.hidden)}
        if model.q_lora_rank:
            made["q_down"] = self.matrix(layer, "q_down", model.q_lora_rank, model.hidden)
            made["q_norm"] = self.norm(layer, "q_norm", model.q_lora_rank)
        return made | {
            "kv_down": self.matrix(layer, "kv_down", latent + model.rope_head_dim, model.hidden),
            "kv_norm": self.norm(layer, "kv_norm", latent),
            "k_up": self.matrix(layer, "k_up", heads * model.head_dim, latent),
            "v_up": self.matrix(layer, "v_up", heads * model.v_head_dim, latent),
            "o": self.matrix(layer, "o", model.hidden, heads * model.v_head_dim),
        }

    def mlp(self, layer: int, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [F, H], up [F, H], down [H, F]) of a dense layer, or of the shared experts of a MoE layer."""
        model, prefix = self.model, "shared_" if shared else ""
        width = model.shared_experts * model.shared_ffn if shared else model.dense_ffn
        gate, up = (self.matrix(layer, prefix + name, width, model.hidden) for name in ("up_gate", "up"))
        return gate, up, self.matrix(layer, f"{prefix}down", model.hidden, width)

    def cache(self, layer: int, queue: int, shape: tuple[int, ...]) -> Tensor:
        """What the sequences of a queue have in their caches from before: pseudo-random values of a fixed pool."""
        size = torch.Size(shape).numel()
        start = (7919 * (layer + 1) + 104_729 * (queue + 1)) % POOL
        pool, repeats = _pool(self.seed), -(-(start + size) // POOL)
        return (pool if repeats == 1 else pool.repeat(repeats))[start : start + size].clone().view(shape)

    def _normal(self, layer: int, name: str, shape: tuple[int, ...]) -> Tensor:
        number = (self.seed * (self.model.num_layers + 1) + layer) * len(NAMES) + NAMES.index(name)
        return torch.randn(shape, generator=torch.Generator().manual_seed(number))
