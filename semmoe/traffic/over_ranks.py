"""Maximum and sum over ranks, the last axis of most arrays. It is short: numpy spends 100 ns on each row of eight, this 6."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


def most(values_XG: NDArray[Any]) -> NDArray[Any]:
    """[...]: the largest of each row of [..., G]."""
    return np.asarray(_most(_rows(values_XG)).reshape(values_XG.shape[:-1]))


def total(values_XG: NDArray[Any]) -> NDArray[Any]:
    """[...]: the sum of each row of [..., G]."""
    return np.asarray(_total(_rows(values_XG)).reshape(values_XG.shape[:-1]))


def _rows(values_XG: NDArray[Any]) -> NDArray[Any]:
    rows = int(np.prod(values_XG.shape[:-1]))  # not -1: of no ranks (pairs that ports stand for) the sum is 0
    return np.ascontiguousarray(values_XG).reshape(rows, values_XG.shape[-1])


@numba.njit(cache=True)
def _most(values_NG):  # type: ignore[no-untyped-def]
    made = values_NG[:, 0].copy()
    for n in range(len(made)):
        largest = made[n]
        for g in range(1, values_NG.shape[1]):
            largest = max(largest, values_NG[n, g])
        made[n] = largest
    return made


@numba.njit(cache=True)
def _total(values_NG):  # type: ignore[no-untyped-def]
    made = np.zeros(len(values_NG), values_NG.dtype)
    for n in range(len(made)):
        for g in range(values_NG.shape[1]):
            made[n] += values_NG[n, g]
    return made
