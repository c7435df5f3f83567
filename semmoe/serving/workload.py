"""Workload: the requests that are served, each with its arrival, lengths, routes and shared prefix.

Few public traces hold routes per token, so many requests come from few traced ones by resampling with replacement
under new ids: copies are never counted as prefix hits. Only prefixes that are declared shared are: by the block ids of a
request log, or by a synthetic `prefix_groups` (requests of a group begin with the same `prefix_tokens` tokens).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..trace import RoutingTrace
from .arrivals import PROCESSES, arrivals_ms
from .request_log import RequestLog, log_digest
from .stepplan import Request

PROCESS_KEYS = {"gamma": ("arrival_cv",), "bursts": ("burst_s", "pause_s")}


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests whose routes are rows of `trace` (several requests may share rows)."""

    trace: RoutingTrace
    requests: list[Request]
    source_R: NDArray[np.int64]  # traced request that each request replays

    @classmethod
    def of(cls, trace: RoutingTrace, work: Mapping[str, Any], seed: int, block_tokens: int = 0) -> Workload:
        """The workload that a config group `workload` of kind serve describes. block_tokens: of a prefix-cache block."""
        common = {"max_prompt": work["max_prompt"], "max_output": work["max_output"], "seed": seed}
        if work["log"] is not None:
            log = RequestLog.load(work["log"])
            return cls.replay(trace, log, work["num_requests"], work["rate_rps"], block_tokens=block_tokens, **common)
        if work["num_requests"] is None:
            raise UserError("workload.num_requests=null means all requests of a log; set workload.log or a number")
        if work["rate_rps"] is None and work["arrivals"] not in ("trace", "all_at_once"):
            raise UserError("workload.rate_rps=null means the pace of a log; set workload.log or a rate")
        process = {key: work[key] for keys in PROCESS_KEYS.values() for key in keys}
        made = cls.sample(trace, work["num_requests"], work["arrivals"], work["rate_rps"], **common, **process)
        groups = int(work["prefix_groups"])
        if groups and not block_tokens:
            raise UserError(f"workload.prefix_groups={groups} needs serving.prefix_block_tokens above 0")
        return made.sharing(groups, int(work["prefix_tokens"]), block_tokens, seed) if groups else made

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
        arrival_cv: float = 1.0,
        burst_s: float = 1.0,
        pause_s: float = 1.0,
    ) -> Workload:
        """`num_requests` requests drawn from the trace; every traced request is used once before any is used again.

        arrivals: a process of arrivals.py at rate_rps requests a second, or "trace" for the trace's own arrival_ms.
        A request without traced decode tokens yields one output token, of its last prompt token.
        """
        if num_requests < 1:
            raise UserError(f"workload.num_requests={num_requests} must be at least 1")
        if arrivals not in PROCESSES:
            raise UserError(f"workload.arrivals='{arrivals}' must be {', '.join(PROCESSES)}")
        rng = np.random.default_rng(seed)
        source_R = _sources(trace, num_requests, rng)
        if arrivals == "trace":
            arrival_ms_R = _traced_arrivals(trace, source_R)
        else:
            arrival_ms_R = arrivals_ms(arrivals, num_requests, rate_rps, rng, arrival_cv, burst_s, pause_s)
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

    @classmethod
    def replay(
        cls,
        trace: RoutingTrace,
        log: RequestLog,
        num_requests: int | None = None,
        rate_rps: float | None = None,
        max_prompt: int | None = None,
        max_output: int | None = None,
        seed: int = 0,
        block_tokens: int = 0,
    ) -> Workload:
        """The first `num_requests` requests of a log (None: all), at its own pace or the same pattern at rate_rps.

        Lengths and prefixes are the log's; the routes are those of traced requests, drawn as in `sample`, which a longer
        request goes through again from their beginning.
        """
        log = log.first(num_requests)
        source_R = _sources(trace, len(log), np.random.default_rng(seed))
        arrival_ms_R = log.arrivals_ms(rate_rps)
        requests = []
        for r, source in enumerate(source_R):
            prompt, ids = int(log.prompt_R[r]), log.prefix_ids[r]
            if block_tokens and (len(ids) - 1) * block_tokens >= prompt:
                raise UserError(
                    f"{log.path}: request {r} has {len(ids)} hash ids for a prompt of {prompt} tokens; "
                    f"serving.prefix_block_tokens={block_tokens} must be the tokens that one id stands for"
                )
            requests.append(
                Request(
                    r,
                    float(arrival_ms_R[r]),
                    min(prompt, max_prompt or prompt),
                    min(int(log.output_R[r]), max_output or int(log.output_R[r])),
                    int(trace.request_offset_R1[source]),
                    int(trace.length_R[source]),
                    ids,
                )
            )
        return cls(trace, requests, source_R)

    def sharing(self, groups: int, prefix_tokens: int, block_tokens: int, seed: int) -> Workload:
        """The same requests, each in one of `groups` groups at random, whose prompts begin with the same tokens.

        Of the `prefix_tokens` shared tokens those in whole blocks inside the prompt count.
        """
        group_R = np.random.default_rng([seed, 1]).integers(0, groups, len(self.requests))
        blocks = prefix_tokens // block_tokens
        made = [
            replace(r, prefix_ids=tuple(int(g) * blocks + b for b in range(min(blocks, r.prompt_len // block_tokens))))
            for r, g in zip(self.requests, group_R, strict=True)
        ]
        return replace(self, requests=made)


def workload_axes(work: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config group `workload` makes the configuration: keys that change nothing are left out, and a log counts
    by its content."""
    axes = dict(work)
    if work["kind"] != "serve":
        return axes
    for process, keys in PROCESS_KEYS.items():
        if work["log"] is not None or work["arrivals"] != process:
            axes = {key: value for key, value in axes.items() if key not in keys}
    if not work["prefix_groups"] or work["log"] is not None:
        del axes["prefix_groups"], axes["prefix_tokens"]
    if work["log"] is None:
        del axes["log"]
    else:
        axes |= {"log": log_digest(work["log"]), "arrivals": "log"}
    return axes


def _sources(trace: RoutingTrace, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Traced requests in random order, each once before any again."""
    rounds = -(-count // trace.num_requests)
    return np.concatenate([rng.permutation(trace.num_requests) for _ in range(rounds)])[:count]


def _traced_arrivals(trace: RoutingTrace, source_R: NDArray[np.int64]) -> NDArray[np.float64]:
    if trace.arrival_ms_R is None:
        raise UserError(f"{trace.path}: holds no arrival_ms; use workload.arrivals=poisson")
    if len(source_R) > trace.num_requests:
        raise UserError(f"workload.arrivals=trace serves at most the {trace.num_requests} traced requests")
    return np.asarray(trace.arrival_ms_R[source_R], dtype=np.float64)


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
