"""PrefixCache: KV blocks of one rank that later requests with the same prompt prefix need not compute again.

A block is `block_tokens` tokens of KV cache under an id that stands for the whole prompt up to its end. Blocks in use by
running requests stay; blocks that nobody uses are kept until their room is needed and go least recently used first,
the end of a prefix before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """users: how many running requests hold each cached block. Unused blocks lie in `_idle`, oldest first."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle_tokens(self) -> int:
        """Tokens of the blocks that could be evicted now."""
        return len(self._idle) * self.block_tokens

    def hit_blocks(self, ids: Sequence[int], prompt_len: int) -> int:
        """Leading blocks of a prompt that are cached; its last token is always computed, for there must be a logit."""
        if not self._users:
            return 0
        most = min(len(ids), (prompt_len - 1) // self.block_tokens)
        return next((i for i in range(most) if ids[i] not in self._users), most)

    def idle_tokens_of(self, ids: Sequence[int]) -> int:
        """How many tokens of these blocks nobody uses."""
        return sum(block in self._idle for block in ids) * self.block_tokens

    def acquire(self, ids: Sequence[int]) -> int:
        """One more request uses these cached blocks; returns how many of their tokens were idle until now."""
        woken = self.idle_tokens_of(ids)
        for block in ids:
            self._idle.pop(block, None)
            self._users[block] += 1
        return woken

    def add(self, block: int) -> bool:
        """A request has computed this block and uses it; False where it is cached already (the copy stays its own)."""
        if block in self._users:
            return False
        self._users[block] = 1
        return True

    def release(self, ids: Sequence[int]) -> int:
        """A request no longer uses these blocks, given from the prompt's beginning; returns the tokens now idle."""
        before = len(self._idle)
        for block in reversed(ids):
            self._users[block] -= 1
            if not self._users[block]:
                self._idle[block] = None
        return (len(self._idle) - before) * self.block_tokens

    def evict(self, tokens: int) -> int:
        """Drop idle blocks until `tokens` tokens are free; returns how many were freed."""
        freed = 0
        while freed < tokens and self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._users[block]
            freed += self.block_tokens
        return freed
