"""How unequal an exchange may be before it costs: weights of the busiest port and of the hottest pair, by operation.

With m the mean over ranks of what a rank sends, p what passes the busiest port (the most that a rank sends or receives)
and q the largest pair, all in rows, a skewed exchange over n ranks takes the time of a balanced one of

    m + a * (p - m) + b * max((n - 1) * q - p, 0)       rows from each rank

a = b = 0: only the sum counts (one core does all copies); a = 1: the busiest port rules (a switch), more: many senders to
one hold each other up; b > 0: one pair alone cannot fill a port, b = 1: it has an even share of one. a in 0..2 and b in 0..1
are fitted to the measured times of FITTED cases; HELD_OUT ones are told apart only by
the residuals, at shares and sizes that the fit has not seen.
Worked example, 4 ranks, 60 rows from each, of which the others send half to rank 0 on purpose: rank 0 receives 120, so
m = 60, p = 120, q = 40; with a = 0.5, b = 0 it costs as much as a balanced exchange of 90 rows from each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .collectives import Case, exchange_rows, home_sizes

EXCHANGES, HOMES = ("dispatch", "combine"), ("srs", "sag")
FITTED, HELD_OUT = (0.4, 1.0), (0.7,)  # shares
Float = NDArray[np.float64]


def skewed_cases(sent_rows: Sequence[int], home_rows: Sequence[int], ranks: int) -> list[Case]:
    """Cases to measure, at the larger half of the sizes: the fitted shares, and held-out ones at sizes in between."""
    if ranks < 3:  # with one other rank nothing can be sent elsewhere; homes may still be unequal
        sent_rows = ()
    cases = []
    for ops, sizes, patterns in ((EXCHANGES, sent_rows, ("port", "pair")), (HOMES, home_rows, ("port",))):
        large = list(sizes[len(sizes) // 2 :])
        for op in ops:
            for pattern in patterns:
                cases += [Case(op, rows, share, pattern) for rows in large for share in FITTED if rows * share >= 1]
                cases += [Case(op, int(rows * 0.75), s, pattern) for rows in large for s in HELD_OUT if rows * s >= 2]
    return cases


def loads(case: Case, ranks: int) -> tuple[float, float, float]:
    """(mean port, busiest port, largest pair) of a case, in rows."""
    if case.op in HOMES:
        counts_G = np.array(home_sizes(ranks, case.rows, case.skew))
        rows_GG = np.tile(counts_G, (ranks, 1)) if case.op == "srs" else np.tile(counts_G[:, None], (1, ranks))
        rows_GG = rows_GG * ~np.eye(ranks, dtype=bool)
    else:
        rows_GG = exchange_rows(ranks, case.rows, case.skew, case.pattern)
    return loads_of(rows_GG)


def loads_of(rows_GG: NDArray[np.int64]) -> tuple[float, float, float]:
    """(mean port, busiest port, largest pair) of rows from each rank to each other."""
    port_G = np.maximum(rows_GG.sum(axis=0), rows_GG.sum(axis=1))
    return float(rows_GG.sum() / len(rows_GG)), float(port_G.max()), float(rows_GG.max())


def fit_skew(us: Mapping[Case, float], ranks: int) -> dict[str, float]:
    """{"dispatch.port": a, "dispatch.pair": b, ...} of the operations in `us` (balanced cases and skewed ones)."""
    weights: dict[str, float] = {}
    for op in (*EXCHANGES, *HOMES):
        cases = [case for case in us if case.op == op and case.skew in FITTED]
        if cases:
            loads_N3, taken_N = np.array([loads(case, ranks) for case in cases]), np.array([us[case] for case in cases])
            a, b = fit_weights(balanced_points(us, op, ranks), loads_N3, taken_N, ranks)
            weights |= {f"{op}.port": a, f"{op}.pair": b if op in EXCHANGES else 0.0}
    return weights


def fit_weights(balanced_B2: Float, loads_N3: Float, taken_N: Float, ranks: int) -> tuple[float, float]:
    """(a, b) of skewed exchanges with these loads and times, from the balanced ones of the same operation (rows, time)."""
    from scipy.optimize import least_squares

    def error(ab: Float) -> Float:
        return np.log(skewed_us(balanced_B2, loads_N3, ranks, ab[0], ab[1]) / taken_N)

    a, b = least_squares(error, (0.5, 0.1), bounds=((0.0, 0.0), (2.0, 1.0)), loss="soft_l1", diff_step=1e-2).x
    return float(a), float(b)


def skewed_us(balanced_B2: Float, loads_N3: Float, ranks: int, a: float, b: float) -> Float:
    """Times by the law above from balanced exchanges (rows from each rank, rising; time): straight lines between them."""
    (rows, times), (mean, port, pair) = balanced_B2.T, loads_N3.T
    size = mean + a * (port - mean) + b * np.maximum((ranks - 1) * pair - port, 0.0)
    slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else times[-1] / rows[-1]
    return np.asarray(np.interp(size, rows, times) + np.maximum(size - rows[-1], 0.0) * max(slope, 0.0))


def balanced_points(us: Mapping[Case, float], op: str, ranks: int) -> Float:
    """[balanced cases of an operation, (rows from each rank, time)], rising."""
    return np.array(
        sorted((loads(case, ranks)[0], time) for case, time in us.items() if case.op == op and not case.skew)
    )


def predicted_us(us: Mapping[Case, float], cases: Sequence[Case], ranks: int, a: float, b: float) -> Float:
    """Times of skewed cases of one operation from its balanced ones."""
    loads_N3 = np.array([loads(case, ranks) for case in cases])
    return skewed_us(balanced_points(us, cases[0].op, ranks), loads_N3, ranks, a, b)


def held_out_errors(us: Mapping[Case, float], ranks: int, weights: Mapping[str, float]) -> dict[str, Float]:
    """Relative errors by operation on the cases that the fit has not seen."""
    errors: dict[str, Float] = {}
    for op in (*EXCHANGES, *HOMES):
        cases = [case for case in us if case.op == op and case.skew in HELD_OUT]
        if cases and f"{op}.port" in weights:
            told = predicted_us(us, cases, ranks, weights[f"{op}.port"], weights[f"{op}.pair"])
            errors[op] = np.abs(told / [us[case] for case in cases] - 1)
    return errors
