"""Serving columns of a result row, from when each request's first token came and when it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..results import summary_ms
from .stepplan import Request


def served_columns(
    requests: Sequence[Request],
    first_token_ms_R: NDArray[np.floating],
    finish_ms_R: NDArray[np.floating],
    preemptions: int,
    slo: Mapping[str, float | None],
    itl_ms: NDArray[np.floating] | None = None,
    prefix_hit_rate: float = 0.0,
) -> dict[str, Any]:
    """ttft, tpot, e2e, throughput and goodput. Times count from a request's arrival; NaN: not reached.

    tpot = (finish - first token) / (output tokens - 1), of requests with more than one output token. The span of the
    throughput runs from the first arrival to the last finish. slo: bounds ttft_ms, tpot_ms and e2e_ms, all
    met for goodput; None or infinite: no bound.
    itl_ms: gaps between output tokens of all requests (ServingLoop.itl_ms); a preempted request shows as a long one.
    """
    arrival_ms_R = np.array([r.arrival_ms for r in requests])
    output_R = np.array([r.output_len for r in requests])
    ttft_ms_R, e2e_ms_R = first_token_ms_R - arrival_ms_R, finish_ms_R - arrival_ms_R
    many = output_R > 1
    tpot_ms_R = np.full(len(requests), np.nan)
    tpot_ms_R[many] = (e2e_ms_R - ttft_ms_R)[many] / (output_R[many] - 1)
    finished = np.isfinite(e2e_ms_R)
    bounds = {name: float(ms) for name, ms in slo.items() if ms is not None and np.isfinite(ms)}
    late_R = [ms_R > bounds.get(name, np.inf) for name, ms_R in
              (("ttft_ms", ttft_ms_R), ("tpot_ms", tpot_ms_R), ("e2e_ms", e2e_ms_R))]  # fmt: skip
    good = finished & ~np.any(late_R, axis=0)
    span_s = (float(np.nanmax(finish_ms_R)) - float(arrival_ms_R.min())) / 1e3 if finished.any() else 0.0
    rates = {"throughput_rps": finished.sum() / span_s, "goodput_rps": good.sum() / span_s} if span_s > 0 else {}
    return {
        **summary_ms("ttft", ttft_ms_R),
        **summary_ms("tpot", tpot_ms_R),
        **summary_ms("e2e", e2e_ms_R),
        **summary_ms("itl", [] if itl_ms is None else itl_ms),
        **{name: float(value) for name, value in rates.items()},
        "preemptions": int(preemptions),
        "prefix_hit_rate": float(prefix_hit_rate),
        **{f"slo_{name}": ms for name, ms in bounds.items()},
    }
