"""BatchForm: the sequences that the tokens of a fixed batch belong to, for what looks at them as such (scope=full_model).

A batch is a bag of rows of the trace. Its attention is that of its shape: in order of the batch, the tokens of a queue (a
rank in dp, all in attention-TP) are

    prefill   prompts of `context_tokens` tokens each, from their first token on (the last prompt takes what is left)
    decode    one token each of as many requests, after `context_tokens` tokens that are cached

Worked example, context_tokens=4, two queues of 6 and 1 tokens: prefill has prompts of 4, 2 and 1 tokens; decode has 6 and 1
requests, whose tokens look at 5 keys each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import UserError
from .serving.stepplan import DECODE, PREFILL, StepPlan

PHASES = {"prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True)
class BatchForm:
    """phase: a key of PHASES; context_tokens: length of a prompt, or tokens cached before the one that is decoded."""

    phase: str = "prefill"
    context_tokens: int = 128

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise UserError(f"workload.form='{self.phase}' must be one of {', '.join(PHASES)}")
        if self.context_tokens < 1:
            raise UserError(f"workload.context_tokens={self.context_tokens} must be at least 1")

    @classmethod
    def of(cls, work: Mapping[str, Any]) -> BatchForm:
        """From a config group `workload` of kind batches."""
        return cls(str(work["form"]), int(work["context_tokens"]))

    @property
    def positions(self) -> int:
        """Keys of a sequence at the end of the step, at most."""
        return self.context_tokens + (self.phase == "decode")

    def sequences(self, tokens: int) -> int:
        """Of a queue with so many tokens."""
        return tokens if self.phase == "decode" else -(-tokens // self.context_tokens)

    def plan(self, tokens_G: Sequence[int], index: int = 0) -> StepPlan:
        """The batch as a step; entries stand in the order of the queues and of their tokens."""
        counts_G = [self._counts(int(tokens)) for tokens in tokens_G]
        count_N = np.concatenate([np.zeros(0, dtype=np.int64), *counts_G])
        rank_N = np.repeat(np.arange(len(counts_G)), [len(counts) for counts in counts_G])
        start = self.context_tokens if self.phase == "decode" else 0
        number_N = np.arange(len(count_N))
        return StepPlan(
            index, rank_N, number_N, np.full_like(number_N, PHASES[self.phase]), np.full_like(number_N, start), count_N
        )

    def _counts(self, tokens: int) -> np.ndarray:
        if self.phase == "decode":
            return np.ones(tokens, dtype=np.int64)
        first_S = np.arange(self.sequences(tokens)) * self.context_tokens
        return np.minimum(tokens - first_S, self.context_tokens)
