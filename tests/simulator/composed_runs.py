"""Runs composed from overrides as the command line composes them, small and without a calibration."""

from __future__ import annotations

from semmoe.builder import RunBuilder
from semmoe.config import compose_all

BATCHES = ("planned_folds=0", "workload.max_batches=3")
UNCALIBRATED = "cluster.file=null"  # whatever this machine's calibration says
SERVE = ("planned_folds=0", UNCALIBRATED, "workload=serve", "workload.num_requests=12", "workload.rate_rps=50")


def build(builder: RunBuilder, *overrides: str):
    (config,) = compose_all(overrides)
    return builder.build(config)
