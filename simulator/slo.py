"""Throughput under SLO: the largest request rate at which a served configuration keeps its latency objectives.

    python -m simulator.slo [slo=paper|absolute] [tolerance=0.02] [key=value ...]

Found by bisection over the rate of the workload's arrivals, whose pattern stays the same (one seed), only faster.

    paper      mean TTFT and mean end-to-end time within 5 x those of the lightest load, requests one at a time
               (section 4: "5 x the latency at the lightest load"; it names no percentile)
    absolute   TTFT, TPOT and end-to-end time of the slowest tenth (p90) within slo.ttft_ms, tpot_ms and e2e_ms
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from semmoe.builder import RunBuilder
from semmoe.errors import UserError
from semmoe.inputs import warn_uncalibrated
from semmoe.row_files import write_row
from semmoe.run import Run
from semmoe.serving.workload import workload_axes
from semmoe.session import folder_of

PAPER_FACTOR = 5.0
MOST_DOUBLINGS = 40
LIGHTEST_RPS = 1e-3  # requests are alone on the machine: a smaller rate changes nothing
BURST = 4  # offered over finished requests a second at which all arrive in one burst: faster changes nothing
Serve = Callable[[float], Mapping[str, Any]]


@dataclass(frozen=True)
class Objective:
    """Bounds on a statistic of served latencies: their 90th percentile ("p90") or "mean". A row meets it when none is above
    its bound; one without a latency (TPOT of single tokens) is not held to it."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    e2e_ms: float = math.inf
    statistic: str = "p90"

    def met(self, row: Mapping[str, Any]) -> bool:
        ending = "" if self.statistic == "mean" else f"_{self.statistic}"
        return not any(row.get(f"{name}{ending}", 0.0) > bound for name, bound in self.bounds.items())

    @property
    def bounds(self) -> dict[str, float]:
        """All three, as the config's group `slo` names them; infinite: not bounded."""
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}

    def __str__(self) -> str:
        known = [f"{name[:-3].upper()} {ms:.3f} ms" for name, ms in self.bounds.items() if math.isfinite(ms)]
        return f"{self.statistic}: {', '.join(known)}"


@dataclass(frozen=True)
class Capacity:
    """rate_rps: the largest offered rate found that meets the objective, 0 where none does. throughput_rps: requests
    finished a second at it. bounded: whether a larger rate was seen to fail; if not, the workload is too short to tell.
    trials: (rate, met) in the order tried."""

    rate_rps: float
    throughput_rps: float
    objective: Objective
    bounded: bool
    trials: tuple[tuple[float, bool], ...] = field(default=())


def throughput_under_slo(
    serve: Serve, objective: Objective, start_rps: float = 1.0, tolerance: float = 0.02
) -> Capacity:
    """Double (or halve) the rate until the objective breaks (or holds), then bisect to within `tolerance` of the rate."""
    if not (start_rps > 0 and 0 < tolerance < 1):
        raise UserError(f"start_rps={start_rps} must be positive and tolerance={tolerance} between 0 and 1")
    trials: list[tuple[float, bool]] = []
    rows: dict[float, Mapping[str, Any]] = {}

    def holds(rate: float) -> bool:
        rows[rate] = serve(rate)
        trials.append((rate, objective.met(rows[rate])))
        return trials[-1][1]

    step = 2.0 if holds(start_rps) else 0.5
    good, bad, rate = (start_rps, None, start_rps) if step > 1 else (None, start_rps, start_rps)
    for _ in range(MOST_DOUBLINGS):
        rate *= step
        if holds(rate):
            good = rate
            if rows[rate]["throughput_rps"] < rate / BURST:
                break
        else:
            bad = rate
        if rate < LIGHTEST_RPS:
            break
        if (good if step < 1 else bad) is not None:
            break
    if good is None:
        return Capacity(0.0, 0.0, objective, True, tuple(trials))
    while bad is not None and bad > good * (1 + tolerance):
        middle = (good * bad) ** 0.5
        if holds(middle):
            good = middle
        else:
            bad = middle
    return Capacity(good, float(rows[good]["throughput_rps"]), objective, bad is not None, tuple(trials))


def server(run: Run) -> Serve:
    """Serve the run's workload at another rate; its row, the same as of a simulated run at that rate."""
    if run.kind != "serve":
        raise UserError("throughput under SLO needs workload=serve")
    if run.cfg["workload"]["log"] is None and run.cfg["workload"]["arrivals"] in ("trace", "all_at_once"):
        raise UserError(f"workload.arrivals={run.cfg['workload']['arrivals']} has no rate to vary; poisson has one")
    from .app import simulate

    def at(rate_rps: float) -> Mapping[str, Any]:
        return simulate(at_rate(run, rate_rps))

    return at


def at_rate(run: Run, rate_rps: float) -> Run:
    """The same run with other arrivals: the same pattern, faster or slower."""
    pools = run.pools and (at_rate(run.pools[0], rate_rps), at_rate(run.pools[1], rate_rps))
    workload = run.cfg["workload"] | {"rate_rps": rate_rps}
    axes = run.axes | {"workload": workload_axes(workload)}
    return replace(run, cfg=run.cfg | {"workload": workload}, axes=axes, pools=pools)


def lightest_load(run: Run, factor: float = PAPER_FACTOR) -> Objective:
    """The paper's objective: `factor` x the mean TTFT and end-to-end time of requests that are alone on the machine."""
    row = server(run)(LIGHTEST_RPS)
    return Objective(factor * row["ttft_ms"], e2e_ms=factor * row["e2e_ms"], statistic="mean")


def absolute(limits: Mapping[str, Any]) -> Objective:
    """The objective of a config's group `slo`; null is no bound."""
    bounds = (math.inf if limits[name] is None else float(limits[name]) for name in Objective().bounds)
    ttft_ms, tpot_ms, e2e_ms = bounds
    return Objective(ttft_ms, tpot_ms, e2e_ms)


def main(argv: Sequence[str]) -> int:
    """Print one configuration's throughput under SLO and the rates tried, and keep a row for each of them."""
    from semmoe.config import compose_one

    own = {"slo": "paper", "tolerance": "0.02"}
    given = dict(word.split("=", 1) for word in argv if word.split("=", 1)[0] in own and "=" in word)
    config = compose_one([word for word in argv if word.split("=", 1)[0] not in own] + ["planned_folds=0"])
    kind, tolerance = (given.get(name, default) for name, default in own.items())
    if kind not in ("paper", "absolute"):
        raise UserError(f"slo={kind} must be paper or absolute")
    try:
        within = float(tolerance)
    except ValueError:
        raise UserError(f"tolerance={tolerance} must be a number between 0 and 1") from None
    run = RunBuilder().build(config)
    warn_uncalibrated([config["cluster"]])
    objective = lightest_load(run) if kind == "paper" else absolute(config["slo"])
    run = replace(run, cfg=run.cfg | {"slo": objective.bounds})
    serve, folder = server(run), folder_of(config)

    def recorded(rate_rps: float) -> Mapping[str, Any]:
        row = serve(rate_rps)
        write_row(folder, row)
        return row

    found = throughput_under_slo(recorded, objective, tolerance=within)
    print(f"objective ({kind}), {objective}")
    for rate, met in found.trials:
        print(f"  {rate:10.2f} requests/s  {'met' if met else 'broken'}")
    words = "" if found.bounded else " (no rate broke it: the workload is too short to find the limit)"
    print(f"offered {found.rate_rps:.2f} requests/s, finished {found.throughput_rps:.2f} requests/s{words}")
    print(f"a row for every rate is in {folder}; `semmoe compare {folder}` draws latency against throughput")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"slo: {error}", file=sys.stderr)
        sys.exit(2)
