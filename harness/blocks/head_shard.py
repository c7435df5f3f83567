"""HeadShard: which heads of a model's attention a rank holds when `ranks` ranks share them; and what that takes in memory.

Query heads are split evenly. Key-value heads too where there are enough; else each rank holds a copy of the one that its
query heads read. A latent row (MLA) serves all heads, so every rank keeps it whole.

Worked example, 8 query heads and 2 key-value heads: over 2 ranks rank 1 has query heads 4..7 and key-value head 1; over 4
ranks rank 1 has query heads 2 and 3, and a copy of key-value head 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from semmoe.errors import UserError
from semmoe.specs import ModelSpec


@dataclass(frozen=True)
class HeadShard:
    """Rank `rank` of `ranks` that share the heads of `model`; UserError where they cannot."""

    model: ModelSpec
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        model, ranks = self.model, self.ranks
        heads, kv_heads = model.num_heads, model.num_kv_heads
        if heads % ranks:
            raise UserError(
                f"{model.name}: {heads} attention heads cannot be split over ep_size={ranks}; use a divisor of {heads}, or "
                "flow=dp, where every rank has all heads"
            )
        if model.attention == "gqa" and (heads % kv_heads or max(kv_heads, ranks) % min(kv_heads, ranks)):
            raise UserError(
                f"{model.name}: {kv_heads} key-value heads of {heads} heads cannot be shared by ep_size={ranks} ranks; one "
                "must be a divisor of the other"
            )
        if (odd := model.head_dim if model.attention == "gqa" else model.rope_head_dim) % 2:
            raise UserError(f"{model.name}: rotary positions turn pairs, so {odd} elements of a head must be even")

    @cached_property
    def heads(self) -> slice:
        """Query heads of this rank."""
        each = self.model.num_heads // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    @cached_property
    def kv_heads(self) -> slice:
        """Key-value heads that they read (GQA)."""
        each = max(self.model.num_kv_heads // self.ranks, 1)
        first = self.rank * self.model.num_kv_heads // self.ranks
        return slice(first, first + each)

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads.stop - self.kv_heads.start

    @property
    def weights(self) -> int:
        """Elements of one attention block on this rank."""
        model = self.model
        if model.attention == "gqa":
            return 2 * model.hidden * model.head_dim * (self.num_heads + self.num_kv_heads)
        latent, query = model.kv_lora_rank, model.head_dim + model.rope_head_dim
        by_head = (model.q_lora_rank or model.hidden) * query + latent * (model.head_dim + model.v_head_dim)
        by_head += model.v_head_dim * model.hidden
        return self.num_heads * by_head + model.hidden * (model.q_lora_rank + latent + model.rope_head_dim)

    @property
    def kv_row(self) -> int:
        """Elements that one token keeps in the cache of one block."""
        if self.model.attention == "mla":
            return self.model.kv_lora_rank + self.model.rope_head_dim
        return 2 * self.num_kv_heads * self.model.head_dim


def elements(heads: slice, size: int) -> slice:
    """Rows of a projection that belong to these heads."""
    return slice(heads.start * size, heads.stop * size)
