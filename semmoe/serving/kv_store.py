"""KvStore: KV tokens in use on every rank, and which cached prefix blocks the requests there share.

A request's own tokens count one by one as they are computed; blocks of a declared prefix count once for all that use
them. Cached blocks that nobody uses lie in the rest of the budget and make way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .prefix_cache import PrefixCache
from .stepplan import Request, ServingLimits


class KvStore:
    """used_G: tokens of running requests, a shared prefix once. caching: whether any request declares a prefix."""

    def __init__(self, requests: Sequence[Request], ranks: int, limits: ServingLimits) -> None:
        self.limits = limits
        self.used_G = np.zeros(ranks, dtype=np.int64)
        self.caches = [PrefixCache(limits.prefix_block_tokens) for _ in range(ranks)]
        self.caching = bool(limits.prefix_block_tokens) and any(r.prefix_ids for r in requests)
        self._held: dict[int, list[int]] = {}  # cached blocks that a request uses, from its prompt's beginning

    def free_tokens(self, rank: int) -> int:
        return int(self.limits.kv_tokens - self.used_G[rank])

    def hit(self, rank: int, request: Request) -> tuple[int, int]:
        """(blocks of its prefix that the rank holds, how many of their tokens nobody uses now)."""
        if not self.caching:
            return 0, 0
        ids, cache = request.prefix_ids, self.caches[rank]
        blocks = cache.hit_blocks(ids, request.prompt_len)
        return blocks, cache.idle_tokens_of(ids[:blocks])

    def hits_RG(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """Prompt tokens of each request whose KV a rank holds now."""
        blocks = [[cache.hit_blocks(r.prefix_ids, r.prompt_len) for cache in self.caches] for r in requests]
        return np.array(blocks, dtype=np.int64) * self.limits.prefix_block_tokens

    def take(self, rank: int, request: Request, blocks: int) -> None:
        """The request uses the first cached blocks of its prefix."""
        if blocks:
            held = list(request.prefix_ids[:blocks])
            self._held[request.id] = held
            self.used_G[rank] += self.caches[rank].acquire(held)

    def give_back(self, rank: int, request: int, computed: int) -> int:
        """All KV of a request with so many computed tokens; returns the tokens freed."""
        before, held = int(self.used_G[rank]), self._held.pop(request, [])
        self.used_G[rank] -= computed - len(held) * self.limits.prefix_block_tokens
        if held:
            self.used_G[rank] -= self.caches[rank].release(held)
        return before - int(self.used_G[rank])

    def keep_blocks(self, computed: Iterable[tuple[int, Request, int]]) -> None:
        """Cache the blocks of declared prefixes that requests have computed, (rank, request, computed tokens), and keep to
        the budget. A block that another request cached meanwhile is used from there on, and the copy is dropped."""
        size = self.limits.prefix_block_tokens
        for rank, request, tokens in computed:
            held, cache = self._held.get(request.id, []), self.caches[rank]
            whole = min(tokens, request.prompt_len) // size
            for block in request.prefix_ids[len(held) : whole]:
                self._held.setdefault(request.id, []).append(block)
                if not cache.add(block):
                    self.used_G[rank] += cache.acquire([block]) - size
        for rank, cache in enumerate(self.caches):
            cache.evict(int(self.used_G[rank]) + cache.idle_tokens - self.limits.kv_tokens)
