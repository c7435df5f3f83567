"""One command over many configurations: build, skip what is done, run, write rows, report progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .bars import progress
from .builder import RunBuilder
from .config import compose_all, compose_one
from .errors import UserError
from .files import check_writable, write_atomically
from .inputs import warn_uncalibrated
from .plan_store import PlanStore
from .plugins import told as in_words
from .row_files import read_row, row_path, write_row
from .rows import label
from .run import Run
from .settings import differing_settings, settings_digest
from .workers import outcomes

SHOWN_WHERE_SWEPT = (
    "model",
    "cluster",
    "ep_size",
    "slots",
    "predictor",
    "replica_router",
    "transport",
    "workload",
    "batch_tokens",
    "rate_rps",
    "dtype",
    "seed",
    "repeat",
)


def folder_of(cfg: dict[str, Any]) -> Path:
    """Where the rows of a run go; replayed step plans go beside the measured rows that they came from."""
    return Path(cfg["replay"]) / "replay" if cfg["replay"] else Path(cfg["results_dir"]) / str(cfg["name"])


def path_of(run: Run, backend: str) -> Path:
    """File of this run's row."""
    identity = {
        "backend": backend,
        "transport": run.cfg["transport"]["name"],
        "cluster": run.cluster.name,
        "config_id": run.config_id,
        "repeat": run.repeat,
    }
    return row_path(folder_of(run.cfg), identity)


def is_done(run: Run, backend: str) -> bool:
    """Whether this row exists, made with the same cluster file, settings, plug-in sources and replayed log."""
    path = path_of(run, backend)
    if run.cfg["rerun"] or not path.is_file():
        return False
    try:
        row = read_row(path)
    except UserError:  # a damaged row is made again
        return False
    settings = settings_digest(run.cfg, backend, run.config_id, run.repeat)
    return bool(row["cluster_digest"] == run.cluster.digest and row.get("settings_digest") == settings)


@dataclass
class Progress:
    """What a command did, for its last line. Rows are printed as they come, through pipes too."""

    verb: str
    runs: int = 0
    kept: int = 0
    rows: int = 0
    configs: set[str] = field(default_factory=set)
    planning_s: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)

    def planned(self) -> None:
        self.planning_s = time.perf_counter() - self.start_s

    def finished(self, path: Path, sweeps: set[str]) -> None:
        row = read_row(path)
        print(_line(row, sweeps), flush=True)
        self.rows += 1
        self.configs.add(row["config_id"])

    def ended(self, run: Run, made: Path | Exception, sweeps: set[str]) -> None:
        """A run's row, or why there is none: said at once where others follow."""
        if isinstance(made, Path):
            self.finished(made, sweeps)
        elif self.runs > 1:
            why = str(made) if isinstance(made, UserError) else in_words(made)
            print(f"failed: {_line(run.identity('simulator', '', ''), sweeps)}: {why}", file=sys.stderr, flush=True)

    def close(self, folders: Collection[Path]) -> None:
        spent_s = time.perf_counter() - self.start_s - self.planning_s
        note = f"; {self.kept} rows exist already and were kept (rerun=true makes them again)" if self.kept else ""
        rows = f", {self.rows} rows," if self.rows > len(self.configs) else ""
        took = f"in {spent_s:.1f} s after {self.planning_s:.1f} s of planning"
        print(f"{self.verb} {len(self.configs)} configuration(s){rows} {took}{note}", flush=True)
        for folder in sorted(folders):
            print(f"rows: {folder}; `semmoe compare {folder}` makes tables and report of them", flush=True)


def _build_all(overrides: Sequence[str], multirun: bool, backend: str, told: Progress) -> list[Run]:
    """Runs to do, each row once. All configs are built before any runs: errors come first, not at run 17."""
    named, runs, configs = dict[Path, Run](), dict[Path, Run](), compose_all(overrides, multirun)
    builder = RunBuilder(PlanStore(Path(configs[0]["results_dir"]) / "plans", renew=bool(configs[0]["rerun"])))
    for config in configs:
        if backend == "harness" and config["replacement"]["every_steps"]:
            raise UserError("replacement.every_steps is for simulate only; measure keeps one placement: set it to 0")
        if config["replay"] and not Path(config["replay"]).is_dir():
            raise UserError(
                f"replay={config['replay']}: no such run; give the folder of a measured run (results/runs/NAME)"
            )
    with progress(len(configs), "planning") as bar:
        for config in configs:
            for run in builder.repeats(config) if backend == "harness" else [builder.build(config)]:
                path = path_of(run, backend)
                if path in named:  # axes that this flow does not have make no second row
                    _refuse_second_settings(named[path], run, backend)
                    continue
                named[path] = run
                if is_done(run, backend):
                    told.kept += 1
                else:
                    runs[path] = run
            bar.update()
    for folder in {path.parent for path in runs}:
        check_writable(folder / "row.json")
    told.planned()
    told.runs = len(runs)
    # every configuration once, then again: a machine that drifts does not favour one of them
    return sorted(runs.values(), key=lambda run: (run.ep_size, run.repeat))


def _refuse_second_settings(run: Run, other: Run, backend: str) -> None:
    """UserError where two configurations of a sweep would write one row although their settings differ."""
    if names := differing_settings(run.cfg, other.cfg, backend):
        folder = "-".join(["NAME", *(f"${{{name}}}" for name in names)])
        raise UserError(
            f"{', '.join(names)}: no part of a configuration's id, so the values of a sweep would share one row; "
            f"give each a folder of its own: 'name={folder}'"
        )


def simulate_all(overrides: Sequence[str], multirun: bool, simulator: Any) -> int:
    """Simulate every configuration and write one row each (or re-execute the step plans of a measured run)."""
    told = Progress("simulated")
    runs = _build_all(overrides, multirun, "simulator", told)
    warn_uncalibrated(run.cfg["cluster"] for run in runs)
    workers = max((int(run.cfg["workers"]) for run in runs), default=1)
    sweeps, ended = _swept(runs), dict[int, Path | Exception]()
    printed = 0  # rows are written as they come and printed in order
    with progress(len(runs), "simulating") as bar, closing(outcomes(simulator, runs, workers)) as coming:
        for position, made in coming:
            folder = folder_of(runs[position].cfg)
            ended[position] = made if isinstance(made, Exception) else write_row(folder, made)
            while printed in ended:
                told.ended(runs[printed], ended[printed], sweeps)
                printed += 1
            bar.update()
    failed = [made for made in ended.values() if isinstance(made, Exception)]
    if len(runs) > 1 or not failed:
        told.close({folder_of(run.cfg) for run in runs})
    faults = [error for error in failed if not isinstance(error, UserError)]
    if faults or (failed and len(runs) == 1):
        raise (faults or failed)[0]
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} configurations failed (named above); the others are kept")
    return 0


def measure_all(overrides: Sequence[str], multirun: bool, harness: Any) -> int:
    """Measure every configuration on one pool of rank processes; rows are written as they are finished."""
    told = Progress("measured")
    runs = _build_all(overrides, multirun, "harness", told)
    sweeps = _swept(runs)
    if runs:
        with progress(len(runs), "measuring") as bar:
            for run, row in harness.measure(runs):
                told.finished(write_row(folder_of(run.cfg), row), sweeps)
                bar.update()
    told.close({folder_of(run.cfg) for run in runs})
    return 0


def _swept(runs: Sequence[Run]) -> set[str]:
    """Columns beside the policies that differ between these runs, and so are shown in every line."""
    seen: dict[str, set[Any]] = {}
    for run in runs:
        row = run.identity("", str(run.cfg["transport"]["name"]), "")
        for name in SHOWN_WHERE_SWEPT:
            seen.setdefault(name, set()).add(row[name])
    return {name for name, values in seen.items() if len(values) > 1}


def _line(row: dict[str, Any], sweeps: Collection[str] = ()) -> str:
    """One configuration in a line: who, what else differs in this sweep, locality, latency."""
    who = f"{row['flow']}/{row['dispatcher']} {row['placement']}"
    who += "".join(f" + {row[k]}" for k in ("request_scheduler", "token_scheduler") if row[k] != "-")
    source = "measured" if row["backend"] == "harness" else "replayed"
    parts = [f"{row['backend']:9s} {row['config_id']} {who:58s}"]
    parts += [f"{name}={row[name]}" for name in SHOWN_WHERE_SWEPT if name in sweeps]
    for name, text in (
        (f"lar_{source}", "LAR {:.3f}"),
        (f"fan_out_{source}", "fan-out {:.2f}"),
        ("imbalance_total", "imbalance {:.2f}"),
        ("layer_ms", "layer {:.3f} ms"),
        ("ttft_ms", "TTFT {:.1f} ms"),
        ("tpot_ms", "TPOT {:.2f} ms"),
        ("throughput_rps", "{:.1f} req/s"),
    ):
        if row.get(name) is not None:
            parts.append(text.format(row[name]))
    return "  ".join(parts)


def place_one(overrides: Sequence[str]) -> int:
    """Compute one placement, write it as JSON beside the runs and print what it is expected to give."""
    run = RunBuilder().build(compose_one(overrides))
    placement = run.fitted.placement
    path = folder_of(run.cfg) / f"placement-{run.config_id}.json"
    content = {
        "physical_to_logical_map": placement.physical_to_logical_LP.tolist(),
        "ep_size": placement.ep_size,
        "layer_ids": list(placement.layer_ids),
        "num_experts": placement.num_experts,
        "model": run.model.name,
        "policy": label(run.cfg["placement"]),
    }
    write_atomically(path, json.dumps(content))
    load_LE = run.fitted.profile.load_LE
    replicas_LE = (placement.logical_to_physical_LEX >= 0).sum(axis=2)
    rank_P = np.arange(placement.num_slots) // placement.slots_per_rank
    load_LG = np.stack(
        [
            np.bincount(rank_P[row >= 0], weights=(load / count)[row[row >= 0]], minlength=placement.ep_size)
            for row, load, count in zip(placement.physical_to_logical_LP, load_LE, replicas_LE, strict=True)
        ]
    )
    imbalance = float((load_LG.max(axis=1) / load_LG.mean(axis=1)).mean())
    print(
        f"{content['policy']}: {placement.num_slots} slots on {placement.ep_size} ranks, {placement.num_layers} MoE layers"
    )
    print(f"imbalance_total on the training part: {imbalance:.3f}")
    for name, value in run.planned.items():
        print(f"{name}_planned: {value:.4g}")
    print(f"written: {path}")
    return 0
