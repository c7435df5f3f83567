"""One command over many configurations: build, skip what is done, run, write rows, report progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .config import compose_all
from .errors import UserError
from .results import row_path, write_atomically, write_row
from .rows import label
from .run import Run, RunBuilder


def folder_of(cfg: dict[str, Any]) -> Path:
    """Where the rows of a run go; replayed step plans go beside the measured rows that they came from."""
    return Path(cfg["replay"]) / "replay" if cfg["replay"] else Path(cfg["results_dir"]) / str(cfg["name"])


def progress(total: int, what: str) -> Any:
    """A progress bar that shows itself only on a terminal and only after two seconds."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit="run", delay=2, disable=not sys.stderr.isatty(), file=sys.stderr)


def is_done(run: Run, backend: str) -> bool:
    """Whether this row exists, made with the same content of the cluster file."""
    identity = {
        "backend": backend,
        "transport": run.cfg["transport"]["name"],
        "cluster": run.cluster.name,
        "config_id": run.config_id,
        "repeat": run.repeat,
    }
    path = row_path(folder_of(run.cfg), identity)
    if run.cfg["rerun"] or not path.is_file():
        return False
    try:
        return bool(json.loads(path.read_text()).get("cluster_digest") == run.cluster.digest)
    except (json.JSONDecodeError, OSError):
        return False


def _build_all(overrides: Sequence[str], multirun: bool, backend: str, repeats: bool) -> tuple[list[Run], int]:
    """(runs to do, rows that exist already). All configs are built before any runs: errors come first, not at run 17."""
    builder, runs, kept = RunBuilder(), [], 0
    configs = compose_all(overrides, multirun)
    for config in configs:
        if config["replay"] and not Path(config["replay"]).is_dir():
            raise UserError(
                f"replay={config['replay']}: no such run; give the folder of a measured run (results/runs/NAME)"
            )
    with progress(len(configs), "planning") as bar:
        for config in configs:
            for run in builder.repeats(config) if repeats else [builder.build(config)]:
                if is_done(run, backend):
                    kept += 1
                else:
                    runs.append(run)
            bar.update()
    # every configuration once, then again: a machine that drifts does not favour one of them
    return sorted(runs, key=lambda run: (run.ep_size, run.repeat)), kept


def simulate_all(overrides: Sequence[str], multirun: bool, simulator: Any) -> int:
    """Simulate every configuration and write one row each (or re-execute the step plans of a measured run)."""
    runs, kept = _build_all(overrides, multirun, "simulator", repeats=False)
    start = time.perf_counter()
    with progress(len(runs), "simulating") as bar:
        for run in runs:
            path = write_row(folder_of(run.cfg), simulator.simulate(run))
            print(_line(json.loads(path.read_text())))
            bar.update()
    _closing("simulated", len(runs), kept, time.perf_counter() - start)
    return 0


def measure_all(overrides: Sequence[str], multirun: bool, harness: Any) -> int:
    """Measure every configuration on one pool of rank processes; rows are written as they are finished."""
    runs, kept = _build_all(overrides, multirun, "harness", repeats=True)
    start = time.perf_counter()
    done = 0
    if runs:
        with progress(len(runs), "measuring") as bar:
            for run, row in harness.measure(runs):
                path = write_row(folder_of(run.cfg), row)
                print(_line(json.loads(path.read_text())))
                done += 1
                bar.update()
    _closing("measured", done, kept, time.perf_counter() - start)
    return 0


def _closing(verb: str, done: int, kept: int, seconds: float) -> None:
    note = f"; {kept} rows exist already and were kept (rerun=true makes them again)" if kept else ""
    print(f"{verb} {done} configuration(s) in {seconds:.1f} s{note}")


def _line(row: dict[str, Any]) -> str:
    """One configuration in a line: who, locality, latency."""
    who = f"{row['flow']}/{row['dispatcher']} {row['placement']}"
    who += "".join(f" + {row[k]}" for k in ("request_scheduler", "token_scheduler") if row[k] != "-")
    source = "measured" if row["backend"] == "harness" else "replayed"
    parts = [f"{row['backend']:9s} {row['config_id']} {who:58s}"]
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
    configs = compose_all(overrides)
    if len(configs) != 1:
        raise UserError(f"semmoe place computes one placement; the overrides describe {len(configs)}")
    run = RunBuilder().build(configs[0])
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
