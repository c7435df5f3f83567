"""Workload: the requests that are served, each with its arrival, lengths and routes.

Few public traces hold routes per token, so many requests come from few traced ones by resampling with replacement
under new ids: copies are never counted as prefix hits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .serving import Request
from .trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests whose routes are rows of `trace` (several requests may share rows)."""

    trace: RoutingTrace
    requests: list[Request]
    source_R: NDArray[np.int64]  # traced request that each request replays

    @classmethod
    def sample(
        cls,
        trace: RoutingTrace,
        num_requests: int,
        arrivals: str = "poisson",
        rate_rps: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
        seed: int = 0,
    ) -> Workload:
        """`num_requests` requests drawn from the trace; every traced request is used once before any is used again.

        arrivals: "poisson" at rate_rps per second; "trace" for the trace's own arrival_ms; "all_at_once".
        A request without traced decode tokens yields one output token, of its last prompt token.
        """
        if num_requests < 1:
            raise UserError(f"workload.num_requests={num_requests} must be at least 1")
        rng = np.random.default_rng(seed)
        rounds = -(-num_requests // trace.num_requests)
        source_R = np.concatenate([rng.permutation(trace.num_requests) for _ in range(rounds)])[:num_requests]
        arrival_ms_R = _arrivals(trace, source_R, arrivals, rate_rps, rng)
        order = np.argsort(arrival_ms_R, kind="stable")
        source_R, arrival_ms_R = source_R[order], arrival_ms_R[order]
        requests = []
        for r, source in enumerate(source_R):
            prompt = max(int(trace.prompt_len_R[source]), 1)
            output = int(trace.length_R[source]) - prompt + 1
            requests.append(
                Request(
                    r,
                    float(arrival_ms_R[r]),
                    min(prompt, max_prompt or prompt),
                    min(output, max_output or output),
                    # a shortened prompt keeps its end, so that the output still follows it
                    int(trace.request_offset_R1[source]) + prompt - min(prompt, max_prompt or prompt),
                )
            )
        return cls(trace, requests, source_R)


def _arrivals(
    trace: RoutingTrace, source_R: NDArray[np.int64], arrivals: str, rate_rps: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    if arrivals == "all_at_once":
        return np.zeros(len(source_R))
    if arrivals == "poisson":
        if not rate_rps > 0:
            raise UserError(f"workload.rate_rps={rate_rps} must be positive")
        return np.cumsum(rng.exponential(1000.0 / rate_rps, len(source_R)))
    if arrivals == "trace":
        if trace.arrival_ms_R is None:
            raise UserError(f"{trace.path}: holds no arrival_ms; use workload.arrivals=poisson")
        if len(source_R) > trace.num_requests:
            raise UserError(f"workload.arrivals=trace serves at most the {trace.num_requests} traced requests")
        return np.asarray(trace.arrival_ms_R[source_R], dtype=np.float64)
    raise UserError(f"workload.arrivals='{arrivals}' must be poisson, trace or all_at_once")


def batches(
    trace: RoutingTrace, batch_tokens: int, composition: str, max_batches: int | None, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Rows of the trace in batches of `batch_tokens` (a shorter last one only where it is the only one).

    composition "shuffled": tokens of all requests mixed; "sequential": requests one after the other.
    """
    if batch_tokens < 1:
        raise UserError(f"workload.batch_tokens={batch_tokens} must be at least 1")
    rows = np.arange(trace.num_tokens)
    if composition == "shuffled":
        rows = np.random.default_rng(seed).permutation(rows)
    elif composition != "sequential":
        raise UserError(f"workload.composition='{composition}' must be shuffled or sequential")
    count = max(trace.num_tokens // batch_tokens, 1)
    for i in range(count if max_batches is None else min(count, max_batches)):
        yield rows[i * batch_tokens : (i + 1) * batch_tokens]
