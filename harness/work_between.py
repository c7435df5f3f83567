"""What a rank computes between two exchanges of a layer, by the size of the exchange.

An exchange of CPU processes waits for the scheduler to run its receivers, and how long that takes depends on what the ranks
computed since the last one. 4 ranks on 2 quiet cores, dispatch of 6 rows from each rank and combine in turn, us (standard
error 200 and 130): after 150 us of work 4,600 + 2,050, after 300 us 4,000 + 1,900, after 500 us 3,400 + 1,450, after 800 us
3,000 + 1,350; of 240 rows likewise, 5,050 + 2,350 to 3,250 + 1,600. So each is timed after the work of a layer that has
exchanges of its size: a dispatch after gate and packing of so many tokens under uniform routes, a combine after their
experts, others after an even share of all.
"""

from __future__ import annotations

from math import comb

import numpy as np

from semmoe.specs import ModelSpec

from .fit import Samples, steady
from .single_ops import Case

OUTWARD = ("dispatch", "dispatch_slots", "gather_rows")  # after gate and packing
BACK = ("combine", "combine_slots", "reduce_rows")  # after the experts
TP_OPS = ("srs", "sag", "reduce_scatter", "all_gather")  # of layers with four exchanges


def tokens_of(case: Case, ranks: int, model: ModelSpec) -> float:
    """Tokens at home on a rank of the layer in which an exchange has this size, with uniform routes.

    Worked example, 4 ranks, 8 experts, top-2: a token misses a rank with probability 15/28, so it travels to 3 * 13/28 = 1.39
    others; 60 rows from a rank are those of 43 tokens."""
    experts, k = model.num_experts, model.top_k
    if case.op in ("dispatch", "combine", "alltoall"):
        missed = comb(experts - experts // ranks, k) / comb(experts, k)
        return case.rows / ((ranks - 1) * (1 - missed))
    if case.op in ("dispatch_slots", "combine_slots"):
        return case.rows / min(k, experts // ranks)
    return float(case.rows)


def work_between_us(case: Case, samples: Samples, ranks: int, model: ModelSpec) -> float:
    """CPU microseconds of a rank before an exchange; from the local work that the calibration has measured."""
    tokens = tokens_of(case, ranks, model)
    before_us = _parts_us(samples, tokens, "back") + _parts_us(samples, tokens, "towards")
    before_us += _between({n: us for (name, n), (_, us) in samples.local.items() if name == "gate"}, tokens)
    after_us = _parts_us(samples, tokens, "around") + _experts_us(samples, tokens, ranks, model)
    if case.op in OUTWARD:
        return before_us
    if case.op in BACK:
        return after_us
    return (before_us + after_us) / (4 if case.op in TP_OPS else 2)


def _parts_us(samples: Samples, tokens: float, part: str) -> float:
    """Index work of one part of a layer, mean over ranks."""
    parts = {key[1]: us_GS for key, us_GS in samples.raw.items() if key[0] == "permute.a2a_dedup" and key[2] == part}
    return _between({n: float(np.mean([steady(us) for us in us_GS])) for n, us_GS in parts.items()}, tokens)


def _experts_us(samples: Samples, tokens: float, ranks: int, model: ModelSpec) -> float:
    """Of the grid's line with the nearest number of active experts, at the rows of each."""
    rows, slots = tokens * model.top_k, model.num_experts // ranks
    touched = slots * (1 - (1 - model.top_k / model.num_experts) ** (tokens * ranks))
    active = min({a for a, _ in samples.experts}, key=lambda a: abs(np.log(a / max(touched, 1.0))))
    line = {each: cpu_us for (a, each), (cpu_us, _) in samples.experts.items() if a == active}
    return _between(line, rows / active)


def _between(us_of: dict[int, float], x: float) -> float:
    known, us = np.array(sorted(us_of.items()), dtype=np.float64).T
    return float(np.interp(x, known, us))
