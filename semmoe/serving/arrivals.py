"""When requests arrive: renewal and on/off processes of a given mean rate, all from one seeded generator.

    poisson   independent arrivals: gaps exponential
    gamma     gaps of a gamma distribution; its coefficient of variation `cv` is the burstiness (1: Poisson, 0: a metronome)
    bursts    Poisson arrivals only while a source is on; on and off periods are exponential with means burst_s and
              pause_s, and the rate while on is rate * (burst + pause) / burst, so that the mean rate is kept

A process is scale-free in its rate: twice the rate gives the same pattern twice as fast (for bursts, where burst_s and
pause_s are given in units of the rate-free pattern, see `burst_gaps`). Sources: Wang et al., BurstGPT, 2024 (gamma gaps);
Heffes and Lucantoni, 1986 (interrupted Poisson process).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

Float = NDArray[np.float64]
PROCESSES = ("poisson", "gamma", "bursts", "all_at_once", "trace")


def poisson_gaps(count: int, rng: np.random.Generator) -> Float:
    """Gaps of mean 1 between arrivals of a Poisson process."""
    return rng.exponential(1.0, count)


def gamma_gaps(count: int, cv: float, rng: np.random.Generator) -> Float:
    """Gaps of mean 1 and coefficient of variation `cv`: gamma with shape 1 / cv^2."""
    if not (np.isfinite(cv) and cv >= 0):
        raise UserError(f"workload.arrival_cv={cv} must be a finite number of at least 0")
    if cv == 0:
        return np.ones(count)
    return rng.gamma(1 / cv**2, cv**2, count)


def burst_gaps(count: int, burst: float, pause: float, rng: np.random.Generator) -> Float:
    """Gaps of mean 1 of an interrupted Poisson process; burst, pause: mean lengths in units of the mean gap.

    Arrivals are drawn on a clock that runs only while the source is on (rate (burst + pause) / burst), then the pauses
    that came before each are added. Worked example, burst = pause = 10: 20 arrivals close together in 10 mean gaps on
    average, then as long without any.
    """
    if not (burst > 0 and pause >= 0 and np.isfinite(burst + pause)):
        raise UserError(
            f"workload.burst_s={burst} must be positive and workload.pause_s={pause} not negative, both finite"
        )
    on_clock = np.cumsum(rng.exponential(burst / (burst + pause), count))
    pauses: Float = np.zeros(0)
    ends: Float = np.zeros(0)  # on the running clock, of each burst
    while not len(ends) or ends[-1] < on_clock[-1]:
        more = rng.exponential(burst, max(int(2 * on_clock[-1] / burst), 16))
        ends = np.concatenate([ends, (ends[-1] if len(ends) else 0.0) + np.cumsum(more)])
        pauses = np.concatenate([pauses, rng.exponential(pause, len(more))])
    before = np.concatenate([[0.0], np.cumsum(pauses)])[np.searchsorted(ends, on_clock)]
    return np.diff(on_clock + before, prepend=0.0)


def arrivals_ms(
    process: str,
    count: int,
    rate_rps: float,
    rng: np.random.Generator,
    cv: float = 1.0,
    burst_s: float = 1.0,
    pause_s: float = 1.0,
) -> Float:
    """`count` arrival times in milliseconds, in order, of a named process at `rate_rps` requests a second."""
    if process == "all_at_once":
        return np.zeros(count)
    if not (np.isfinite(rate_rps) and rate_rps > 0):
        raise UserError(f"workload.rate_rps={rate_rps} must be a positive number")
    if process == "poisson":
        gaps = poisson_gaps(count, rng)
    elif process == "gamma":
        gaps = gamma_gaps(count, cv, rng)
    elif process == "bursts":
        gaps = burst_gaps(count, burst_s * rate_rps, pause_s * rate_rps, rng)
    else:
        raise UserError(f"workload.arrivals='{process}' must be {', '.join(PROCESSES)}")
    return np.asarray(np.cumsum(gaps * (1e3 / rate_rps)))
