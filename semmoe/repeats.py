"""How far repeats of one configuration lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations


def mean_difference(repeats: Iterable[float]) -> float:
    """Mean of |a - b| over all pairs of repeats, in their unit; NaN ones are left out, and of fewer than two it is NaN.

    Unlike the range it does not grow with the number of repeats, so that more of them allow no larger error.
    """
    pairs = [abs(a - b) for a, b in combinations((each for each in repeats if not math.isnan(each)), 2)]
    return sum(pairs) / len(pairs) if pairs else math.nan
