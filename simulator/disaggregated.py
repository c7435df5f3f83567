"""Prefill-decode disaggregation: two pools of ranks, each with its own loop and placement, and KV transfers between them.

    arrival -> prefill loop -> first token -> decode loop, until it has room -> KV transfer -> decode steps -> end

A prompt's KV stays on its prefill rank until the transfer is over. A request that a decode rank preempts is recomputed
there. Requests of one output token end in the prefill pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from semmoe.results import summary_ms
from semmoe.serving import Request, ServingLoop
from semmoe.serving.columns import served_columns

from .engine import Event, Server, arrivals, progress
from .kv_link import KvLink
from .step_timer import Timer


@dataclass(frozen=True, eq=False)
class Disaggregated:
    """A service of two pools. The prefill loop holds the same requests with one output token each, and their KV
    (`hold_kv`); the decode loop holds them whole."""

    requests: list[Request]
    prefill: ServingLoop
    decode: ServingLoop
    link: KvLink

    def finish_ms_R(self) -> NDArray[np.float64]:
        """When each request ended, in whichever pool."""
        short_R = np.array([r.output_len == 1 for r in self.requests])
        return np.where(short_R, self.prefill.finish_ms_R, self.decode.finish_ms_R)

    def served(self, slo: Mapping[str, float | None]) -> dict[str, Any]:
        """Serving columns of the finished run, with the KV transfers."""
        preemptions = self.prefill.preemptions + self.decode.preemptions
        times = (self.prefill.first_token_ms_R, self.finish_ms_R(), preemptions)
        columns = served_columns(self.requests, *times, slo, self.decode.itl_ms(), self.prefill.prefix_hit_rate)
        return columns | summary_ms("kv_transfer", self.link.durations_ms) | {"kv_bytes": self.link.bytes_sent}


def simulate_disaggregated(service: Disaggregated, prefill: Timer, decode: Timer, show: bool = False) -> None:
    """Serve every request; both timers' timelines hold the steps of their pool."""
    env, link, requests = simpy.Environment(), service.link, service.requests
    over = env.event()
    handed_on = np.zeros(len(requests), dtype=bool)

    def hand_on() -> None:
        """Finished prompts go to the decode pool, or out where their first token is their last."""
        for r in np.flatnonzero(np.isfinite(service.prefill.finish_ms_R) & ~handed_on).tolist():
            handed_on[r] = True
            if requests[r].output_len > 1:
                decoding.submit(requests[r], float(service.prefill.finish_ms_R[r]))
            else:
                service.prefill.free(r)
        check_over()

    def send() -> None:
        """Start the transfers that the decode pool has room for."""
        for r in service.decode.fetches():
            env.process(transfer(r))

    def transfer(r: int) -> Event:
        source, target = int(service.prefill.rank_R[r]), int(service.decode.rank_R[r])
        yield env.timeout(link.send(requests[r].prompt_len, source, target, env.now) - env.now)
        service.prefill.free(r)
        prefilling.wake()
        service.decode.fetched(r)
        decoding.wake()

    def check_over() -> None:
        ended = int(np.isfinite(service.finish_ms_R()).sum())
        bar.update(ended - bar.n)
        if ended == len(requests) and not over.triggered:
            over.succeed()

    with progress(len(requests), "serving", show) as bar:
        prefilling = Server(env, service.prefill, prefill, after_step=hand_on)
        decoding = Server(env, service.decode, decode, after_plan=send, after_step=check_over)
        env.process(arrivals(env, service.prefill.requests, prefilling.submit))
        env.run(until=over)
    prefill.timeline.end_ms = decode.timeline.end_ms = float(env.now)
