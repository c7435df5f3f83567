"""What the command line starts: `measure` and `calibrate`. Under torchrun, rank 0 drives and the others follow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import psutil
from omegaconf import OmegaConf
from tqdm import tqdm

from semmoe.errors import UserError, nearest
from semmoe.files import check_writable, write_atomically
from semmoe.row_files import row_path
from semmoe.run import Run
from semmoe.serving.steplog import step_log_path
from semmoe.session import folder_of
from semmoe.specs import ClusterSpec

from .calibration.collect import EFFORTS, Effort, Taken, collect, samples_of
from .calibration.fit import cluster_dict
from .calibration.planning import fitted_predictors
from .calibration.residuals import busy_warning, load_1min, residuals, spread, table
from .environment import environment, usable_cores
from .measure import how_measured, is_virtual, measure_run
from .pool import open_pool
from .preflight import preflight
from .record import save_times
from .torchrun import follow, is_follower, under_torchrun


def measure(runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """(run, result row) as each is finished, on one pool for all runs of the same number of ranks; repeats on processes of
    their own, since times of one pool are alike and those of the next are not: their spread is what a prediction can miss by.

    Raw times, and a served run's step log, are written beside its row before the row is handed out. An error ends the
    pool; rows that were handed out before stay.
    """
    if is_follower():
        follow(_timeout_s(runs[0]) if runs else 120.0)
        return
    for run in runs:
        how_measured(run, run.ep_size)  # what cannot be measured is said before anything is
    told: set[int] = set()  # ranks whose preflight has been printed
    for (ranks, virtual, _), group in groupby(runs, key=_pool_key):
        members = list(group)
        with open_pool(ranks, max(_timeout_s(run) for run in members), virtual) as pool:
            found = preflight(pool, members)
            if ranks not in told:
                print(found, flush=True)
            told.add(ranks)
            for run in members:
                row, log, times = measure_run(pool, run)
                folder = folder_of(run.cfg)
                if log is not None:
                    row["steps_file"] = log.save(step_log_path(folder, run.config_id, run.repeat)).name
                row["times_file"] = save_times(row_path(folder, row).with_suffix(".times.npz"), times).name
                yield run, row


def _pool_key(run: Run) -> tuple[int, bool, int]:
    """What the runs of one pool have in common: (ranks, virtual, repeat, where ranks are started for it)."""
    virtual = is_virtual(run)
    return run.ep_size, virtual, 0 if virtual or under_torchrun() else run.repeat


def calibrate(run: Run, file: str | Path, effort: Effort | None = None) -> Path:
    """Measure single operations on run.ep_size ranks and write the cluster file `file`. effort: how much, if not what
    `measure.calibration` says.

    The raw samples go beside it (.samples.json). Prints how well the file describes its own samples. Under torchrun a
    follower returns when rank 0 has finished.
    """
    effort = effort or _effort(str(run.cfg["measure"]["calibration"]))
    path = Path(file)
    check_writable(path)
    if is_follower():
        follow(_timeout_s(run))
        return path
    load = load_1min()
    samples = samples_of(_in_pools(run, effort), run.model.num_moe_layers)
    memory_gib = psutil.virtual_memory().total / 2**30
    content = cluster_dict(run, samples, usable_cores(), memory_gib, time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    ClusterSpec.from_dict(content)  # what is written must be readable
    report = residuals(samples, content, run.ep_size)
    warning = busy_warning(load, usable_cores(), spread(samples))
    raw = {
        "environment": environment(run.ep_size) | {"load_1min": load, "spread": spread(samples), "warning": warning},
        "collectives_us": [[*case, ranks, *map(float, us)] for (case, ranks), us in samples.collectives.items()],
        "opening_us": [[*case, ranks, *map(float, us)] for (case, ranks), us in samples.opening.items()],
        "local_us": [[list(key), us_GS] for key, us_GS in samples.raw.items()],
        "experts_us": [[*key, *us] for key, us in samples.experts.items()],
        "attention_us": [
            [name, *work, us] for name, points in samples.attention.items() for work, us in points.items()
        ],
        "blocks_us": [[name, *work, us] for name, points in samples.blocks.items() for work, us in points.items()],
        "residuals": [line._asdict() for line in report],
    }
    write_atomically(path.with_suffix(".samples.json"), json.dumps(raw, indent=1))
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(content)))
    print(table(report))
    if warning:
        print(f"semmoe calibrate: warning: {warning}", file=sys.stderr)
    print(f"written: {path}")
    return path


def _in_pools(run: Run, effort: Effort) -> list[Taken]:
    """What each pool of ranks measured; under torchrun, whose ranks are given, all samples come from them."""
    given = under_torchrun()
    pools = 1 if given else effort.pools
    if given:
        more = {name: getattr(effort, name) * effort.pools for name in ("samples", "local_samples")}
        effort = replace(effort, **more)
    predictors, taken = fitted_predictors(run), []
    with _Bars() as bars:
        for i in range(pools):
            bars.of_all = f", ranks started {i + 1} of {pools} times" if pools > 1 else ""
            with open_pool(run.ep_size, _timeout_s(run)) as pool:
                taken.append(collect(pool, run, effort, predictors, bars.show))
    return taken


def _effort(name: str) -> Effort:
    if name not in EFFORTS:
        raise UserError(f"measure.calibration='{name}'{nearest(name, EFFORTS)}; {' or '.join(EFFORTS)}")
    return EFFORTS[name]


class _Bars:
    """One progress bar a stage, on a terminal only and only where a stage takes two seconds."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._what = self.of_all = ""

    def show(self, what: str, done: int, total: int) -> None:
        what += self.of_all
        if what != self._what or self._bar is None or total != self._bar.total:
            self.close()
            self._what, self._bar = what, tqdm(total=total, desc=what, delay=2, disable=not sys.stderr.isatty())
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _timeout_s(run: Run) -> float:
    return float(run.cfg["measure"]["timeout_s"])
