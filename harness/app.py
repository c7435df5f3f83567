"""What the command line starts: `measure` and `calibrate`. Under torchrun, rank 0 drives and the others follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from semmoe.run import Run
from semmoe.session import folder_of
from semmoe.steplog import step_log_path

from .measure import measure_run
from .pool import open_pool
from .torchrun import follow, is_follower


def measure(runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """(run, result row) as each is finished, on one pool for all runs of the same number of ranks.

    A served run's step log is written beside its row before the row is handed out. An error ends the pool; rows that
    were handed out before stay.
    """
    if is_follower():
        follow(_timeout_s(runs[0]) if runs else 120.0)
        return
    for ranks, group in groupby(runs, key=lambda run: run.ep_size):
        members = list(group)
        with open_pool(ranks, max(_timeout_s(run) for run in members)) as pool:
            for run in members:
                row, log = measure_run(pool, run)
                if log is not None:
                    path = step_log_path(folder_of(run.cfg), run.config_id, run.repeat)
                    row["steps_file"] = log.save(path).name
                yield run, row


def _timeout_s(run: Run) -> float:
    return float(run.cfg["measure"]["timeout_s"])
