"""Does the interval of predictions hold what was measured? `python -m simulator.coverage RUN [RUN ...] [--level 0.8]`.

Takes the rows of run folders (simulated and measured, joined as `semmoe compare` does), makes the interval that `advise`
would give each configuration's layer time, and each pair of configurations' gain, and counts how often the measured
value lies inside. On CPU machines the residuals of a configuration's interval come from the other configurations
(leave one out), and what two configurations have in common from pairs of other settings, so that none is judged by
itself; configurations of fewer than three others get the committed ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semmoe.axes import setting
from semmoe.compare import compare
from semmoe.config import conf_dir
from semmoe.errors import UserError
from semmoe.files import write_atomically
from semmoe.inputs import load_cluster
from semmoe.results import TIMED, WAITS
from semmoe.specs import ClusterSpec

from .cost.uncertainty import LEVEL, Residuals, interval, possible_ms

WHOLE = ("layer", "step", "attention", *WAITS)


@dataclass(frozen=True)
class Case:
    """One interval and the measured value: milliseconds of a layer, or percent of gain."""

    what: str
    low: float
    predicted: float
    high: float
    measured: float

    @property
    def held(self) -> bool:
        return self.low <= self.measured <= self.high


def cases(folders: Sequence[str | Path], level: float = LEVEL) -> tuple[list[Case], list[Case]]:
    """(layer times, gains of a configuration over the first of its setting) with their intervals."""
    comparison = compare(folders)
    table: Any = comparison.table[comparison.table.sides == "both"].dropna(
        subset=["layer_ms_predicted", "layer_ms_measured"]
    )
    if table.empty:
        raise UserError(f"{', '.join(map(str, folders))}: no configuration was both simulated and measured")
    logs = np.log((table.layer_ms_measured / table.layer_ms_predicted).to_numpy())
    lines: list[Any] = list(table.itertuples())
    layers, gains = [], []
    phases = [_phases(comparison.rows[comparison.rows.key == line.key]) for line in lines]
    settings = [setting(comparison.rows[comparison.rows.key == line.key].iloc[0]) for line in lines]
    first_of = [settings.index(found) for found in settings]
    clusters = {str(line.cluster): _cluster(str(line.cluster)) for line in lines}
    for i, line in enumerate(lines):
        cluster = clusters[str(line.cluster)]
        first = first_of[i]
        elsewhere = [logs[a] - logs[b] for a, b in enumerate(first_of) if a != b and b != first]
        others = Residuals.of(np.delete(logs, i).tolist(), elsewhere) if cluster.cores else None
        low, high = interval(possible_ms([phases[i]], cluster, seed=i, residuals=others)[:, 0], level)
        layers.append(Case(line.configuration, low, line.layer_ms_predicted, high, line.layer_ms_measured))
        if first == i:
            continue
        both = possible_ms([phases[i], phases[first]], cluster, seed=i, residuals=others)
        low, high = interval(100 * (1 - both[:, 0] / both[:, 1]), level)
        predicted, measured = (100 * (1 - getattr(line, f"layer_ms_{side}") / getattr(lines[first], f"layer_ms_{side}"))
                               for side in ("predicted", "measured"))  # fmt: skip
        gains.append(Case(f"{line.configuration} over {lines[first].configuration}", low, predicted, high, measured))
    return layers, gains


def _phases(rows: pd.DataFrame) -> dict[str, float]:
    simulated = rows[rows.backend == "simulator"]
    names = [name for name in TIMED if name not in WHOLE and simulated[f"{name}_ms"].notna().any()]
    return {name: float(simulated[f"{name}_ms"].astype(float).mean()) for name in names}


def _cluster(name: str) -> ClusterSpec:
    from omegaconf import OmegaConf

    file = conf_dir() / "cluster" / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"cluster {name}: no such preset; coverage needs the cluster that the rows were simulated on")
    raw = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(raw, dict)
    return load_cluster({str(k): v for k, v in raw.items()})[1]


def report(folders: Sequence[str | Path], level: float = LEVEL) -> str:
    """Markdown: coverage, then every case."""
    lines = []
    for title, found, unit in zip(("layer time", "gain"), cases(folders, level), ("ms", "%"), strict=True):
        if not found:
            continue
        held = sum(case.held for case in found)
        lines += [
            f"{title}: the {level:.0%} interval holds {held} of {len(found)} values, {held / len(found):.0%}",
            "",
        ]
        lines += [f"| {title} of | low {unit} | predicted | high | measured | held |", "| --- |" + " --- |" * 5]
        for c in found:
            numbers = " | ".join(f"{value:.3g}" for value in (c.low, c.predicted, c.high, c.measured))
            lines.append(f"| {c.what} | {numbers} | {'yes' if c.held else 'no'} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print (or write) the coverage of runs."""
    parser = argparse.ArgumentParser(prog="python -m simulator.coverage", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders with simulated and measured rows (results/runs/NAME)")
    parser.add_argument("--level", type=float, default=LEVEL, help="share that the interval should hold")
    parser.add_argument("--out", type=Path, help="Markdown file (default: standard output)")
    options = parser.parse_args(argv)
    if not 0 < options.level < 1:
        raise UserError(f"--level {options.level} must lie between 0 and 1")
    text = report(options.runs, options.level)
    if options.out:
        made = f"Made by `python -m simulator.coverage {' '.join(options.runs)}`."
        write_atomically(options.out, f"# Coverage of the intervals of predictions\n\n{made}\n\n{text}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"coverage: {error}", file=sys.stderr)
        sys.exit(2)
