"""`python -m semmoe.placement.exact`: the gap of `semantic` against proved optima on small real instances, as a table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_atomically
from ..rows import commit
from ..sources.fingerprints import load_fingerprints
from ..trace import RoutingTrace
from .base import PlacementProblem
from .exact import relative_gap, solve, values_of
from .instances import cut, problem_of, request_instance, token_instance
from .lagrangian import upper_bound
from .program import programs_of
from .random import Random
from .semantic import Semantic

ROUTES = Path("../shared/data/traces/gptoss20b_mmlu_decode_routes.npz")


@dataclass(frozen=True)
class Kind:
    """One kind of instance: `layers` > 0 requests with one home over the layers, 0: token types in one layer."""

    name: str
    experts: int
    items: int
    layers: int
    ranks: int

    def draw(self, trace: RoutingTrace, seed: int) -> PlacementProblem:
        rng = np.random.default_rng([seed, self.experts, self.items, self.layers, self.ranks])
        if self.layers:
            small = request_instance(trace, self.experts, self.items, self.layers, rng)
        else:
            small = token_instance(trace, self.experts, self.items, rng)
        return problem_of(small, self.ranks, "request", seed)


KINDS = (
    Kind("requests, 1 layer", 8, 16, 1, 4),
    Kind("requests, 2 layers", 8, 16, 2, 2),
    Kind("requests, 2 layers", 8, 24, 2, 4),
    Kind("requests, 1 layer", 12, 24, 1, 3),
    Kind("token types, 1 layer", 8, 24, 0, 2),
    Kind("token types, 1 layer", 8, 32, 0, 4),
    Kind("token types, 1 layer", 12, 32, 0, 4),
    Kind("token types, 1 layer", 12, 40, 0, 2),
)


@dataclass(eq=False)
class Kept:
    """Figures of finished cases in a file of JSON lines, for a run that goes on where the last one stopped. The first line
    names what they were made from: figures of anything else are dropped."""

    path: Path
    made_from: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        lines = [
            line for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]  # the last one may be cut short
        if lines and json.loads(lines[0]) == self.made_from:
            self.figures = dict(json.loads(line) for line in lines[1:])
        kept = [json.dumps(self.made_from), *(json.dumps(pair) for pair in self.figures.items())]
        write_atomically(self.path, "\n".join(kept) + "\n")

    def figure(self, name: str, make: Callable[[], Any]) -> Any:
        """The figure of a case, made now or before."""
        if name not in self.figures:
            self.figures[name] = make()
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps([name, self.figures[name]]) + "\n")
        return self.figures[name]


def measure(trace: RoutingTrace, instances: int, restarts: int, kept: Kept) -> list[str]:
    """Rows of the table: per kind the mean and worst gap, then all together."""
    lines, everything = [], []
    for number, kind in enumerate(KINDS):
        count = instances // len(KINDS) + (number < instances % len(KINDS))
        found = []
        for seed in range(count):
            case = f"{kind.experts} experts, {kind.items} {kind.name}, {kind.ranks} ranks: instance {seed + 1}"
            _tell(f"{case} of {count}")
            found.append(kept.figure(case, partial(gaps_of, kind.draw(trace, seed), restarts)))
        gaps = [gaps for gaps, _ in found]
        everything += gaps
        if count:
            size = f"{kind.experts} experts, {kind.items} {kind.name}, {kind.ranks} ranks"
            lines.append(_row(size, gaps) + f" {sum(took for _, took in found) / count:.2f} |")
    lines.append(_row("**all**", everything) + " |")
    return lines


def gaps_of(problem: PlacementProblem, restarts: int) -> tuple[list[float], float]:
    """(gap of semantic, with more starts, and of a random placement; seconds)."""
    begin = time.perf_counter()
    (program,) = programs_of(problem)
    best = solve(program, problem.rng(), time_limit_s=600.0)
    policies = (Semantic(load_weight=0.0), Semantic(load_weight=0.0, restarts=restarts), Random())
    values = [values_of(policy.place(problem), [program])[0] for policy in policies]
    return [float(relative_gap(value, best.bound)) for value in values], time.perf_counter() - begin


def bounds(trace: RoutingTrace, time_limit_s: float, restarts: int, kept: Kept) -> list[str]:
    """Rows of the table of larger cases: a layer of all experts with all requests, bounded but not enumerated."""
    lines = []
    for layer in (0, 8, 16, 23):
        for ranks in (4, 8):
            case = f"layer {layer} on {ranks} ranks: bound within {time_limit_s:g} s"
            _tell(case)
            part = cut(trace, np.array([layer]), np.arange(trace.num_experts), trace.request_T)
            problem = problem_of(part, ranks, "request")
            cells = kept.figure(case, partial(bound_of, problem, time_limit_s, restarts))
            lines.append(f"| layer {layer} | {ranks} | {cells}")
    return lines


def bound_of(problem: PlacementProblem, time_limit_s: float, restarts: int) -> str:
    """Value, bound and how it was found, as cells of a row."""
    (program,) = programs_of(problem)
    (value,) = values_of(Semantic(load_weight=0.0, restarts=restarts).place(problem), [program])
    begin = time.perf_counter()
    bound = upper_bound(program, time_limit_s, value)
    took = time.perf_counter() - begin
    return (
        f"{value / program.total:.4f} | {bound.bound / program.total:.4f} | {relative_gap(value, bound.bound):.2%} | "
        f"{bound.method}, {bound.steps} steps | {took:.0f} |"
    )


def _tell(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def _row(name: str, gaps: list[list[float]]) -> str:
    table = np.array(gaps)
    cells = " | ".join(f"{table[:, i].mean():.3%} | {table[:, i].max():.2%}" for i in range(table.shape[1]))
    return f"| {name} | {len(table)} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m semmoe.placement.exact", description=__doc__)
    parser.add_argument("--routes", default=str(ROUTES), help="file of real routes")
    parser.add_argument("--instances", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=16, help="starts of semantic")
    parser.add_argument("--bound-seconds", type=float, default=0.0, help="also bound full layers, this long each")
    parser.add_argument("--out", default="results/placement_gap.md")
    parser.add_argument("--kept", type=Path, default=Path("results/runs/placement_gap.jsonl"), help="finished cases")
    options = parser.parse_args()
    trace = load_fingerprints(options.routes)
    made_from = {"routes": trace.digest, "restarts": options.restarts, "commit": commit()}
    kept = Kept(options.kept, made_from)
    rows = measure(trace, options.instances, options.restarts, kept)
    command = f"python -m semmoe.placement.exact --instances {options.instances} --restarts {options.restarts}"
    if options.bound_seconds:
        command += f" --bound-seconds {options.bound_seconds:g}"
    text = [
        "# Placement against the proved optimum",
        "",
        f"Made by `{command}` from the routes of {Path(options.routes).stem} ({trace.num_requests} requests, "
        f"{trace.num_tokens} tokens, {trace.num_layers} layers, {trace.num_experts} experts, top-{trace.top_k}).",
        "",
        "Objective: assignments served at home, at most 1.10 times the mean number of items at a home, E / G experts a",
        "rank. Every placement is given its best homes (exact), so that placements alone differ. Gap = (optimum - value)",
        "/ optimum. `semantic` runs without its load term (load_weight=0), with its defaults otherwise and with",
        f"restarts={options.restarts}. Instances are",
        "random requests (or frequent token types, equally often each), experts drawn by load, and adjacent layers.",
        "",
        "| instances | count | semantic mean | worst | more starts: mean | worst | random mean | worst | s each, all told |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    if options.bound_seconds:
        text += [
            "",
            "Full layers (32 experts, all requests) are too large to enumerate: bound instead of optimum, so the gap is",
            "at most what is shown. Shares are of all assignments.",
            "",
            "| case | ranks | semantic | upper bound | gap at most | bound by | s |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *bounds(trace, options.bound_seconds, options.restarts, kept),
        ]
    write_atomically(options.out, "\n".join(text) + "\n")
    print("\n".join(text))
