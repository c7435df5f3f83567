"""Exchanges whose skew is turned by a dial: what skew.py times.

A pattern mixes the even exchange with an extreme one of the same total, share `dial` of it:

    hot_receiver   all ranks send to rank 0                permutation   rank r sends to rank r + 1 alone
    hot_sender     rank 0 sends to all                     few_pairs     rank 1 sends to 0, 3 to 2, ...; nobody else sends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PATTERNS = ("hot_receiver", "hot_sender", "permutation", "few_pairs")
DIALS, HELD_OUT_DIAL = (0.25, 0.5, 1.0), 0.75
ROW_BYTES = 256


@dataclass(frozen=True)
class Exchange:
    """total_bytes of all ranks together to others; pattern "even" with dial 0, or one of PATTERNS. held_out: not fitted."""

    total_bytes: int
    pattern: str = "even"
    dial: float = 0.0
    held_out: bool = False

    def rows_GG(self, ranks: int) -> NDArray[np.int64]:
        """Rows of ROW_BYTES from each rank to each other. Worked example, 3 ranks, 600 rows: "even" has 100 from each to each
        other; "hot_receiver" with dial 1 has 300 from ranks 1 and 2 to rank 0, with dial 0.5 half of both."""
        even = ~np.eye(ranks, dtype=bool) / (ranks * (ranks - 1))
        share_GG = (1 - self.dial) * even + self.dial * extreme(self.pattern, ranks)
        return np.rint(share_GG * self.total_bytes / ROW_BYTES).astype(np.int64)


def extreme(pattern: str, ranks: int) -> NDArray[np.float64]:
    """Shares of all bytes from each rank to each other where a pattern goes all the way."""
    share_GG = np.zeros((ranks, ranks))
    if pattern == "hot_receiver":
        share_GG[1:, 0] = 1 / (ranks - 1)
    elif pattern == "hot_sender":
        share_GG[0, 1:] = 1 / (ranks - 1)
    elif pattern == "permutation":
        share_GG[np.arange(ranks), (np.arange(ranks) + 1) % ranks] = 1 / ranks
    elif pattern == "few_pairs":
        share_GG[np.arange(1, ranks, 2), np.arange(0, ranks - 1, 2)] = 1 / (ranks // 2)
    return share_GG


def patterns_of(ranks: int) -> tuple[str, ...]:
    """Those that differ from each other: between two ranks a permutation is even, and one pair a hot receiver."""
    return PATTERNS if ranks > 2 else PATTERNS[:2]


def exchanges(sizes: Sequence[int], ranks: int) -> list[Exchange]:
    """Even and skewed ones of every size; held-out ones at sizes in between (their geometric means) and another dial."""
    patterns = patterns_of(ranks)
    fitted = [Exchange(size) for size in sizes]
    fitted += [Exchange(size, pattern, dial) for size in sizes for pattern in patterns for dial in DIALS]
    between = [int((one * other) ** 0.5) for one, other in pairwise(sizes)]
    return fitted + [Exchange(size, pattern, HELD_OUT_DIAL, True) for size in between for pattern in patterns]
