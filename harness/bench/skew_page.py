"""The page of skewed exchanges (skew.py): times by size and pattern, the law fitted to them, its held-out errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.errors import UserError

from ..calibration.fit import isotonic
from ..calibration.skew import fit_weights, loads_of, skewed_us
from .exchanges import Exchange

Float = NDArray[np.float64]
Line = dict[str, Any]


ON_CPUS = """**Between CPU processes a message is a copy in memory, made by cores that ranks share: no link speed follows from
these times.** They say what skew costs on this machine, which is what the simulator of this machine needs, and that the
instrument works. On a machine with 8 GPUs the same command times NCCL on 2 and on 8 of them: the table that no public data
set has."""
ON_GPUS = "Between GPUs of one machine: one call of NCCL, timed on the devices after they have slept and met."


def document(lines: Sequence[Line], command: str) -> str:
    """The Markdown page. lines: of skew.measure. UserError where a number of ranks has no even or no skewed case."""
    about = lines[0]["environment"]
    machine = f"{about['topology']}, {about['gpu']}" if "gpu" in about else f"{about['cores']} cores of {about['cpu']}"
    calls = min(len(line["us"]) for line in lines)
    text = ["# Skewed all-to-all: time by bytes, pattern and skew", ""]
    text += [
        f"Made by `{command}` (`harness/bench/skew.py`) on {machine}, torch {about['torch']},",
        f"commit {about['commit']}, load {about['load_1min']} before it began. Raw samples of each call: `skew.samples.jsonl`.",
        "",
        f"The library's all-to-all of so many bytes in all, own rows apart: medians over {calls} calls, slowest rank, in us;",
        "in brackets over the even exchange of the same total. Skew: bytes through the busiest port (the most that a rank",
        "sends or receives) over the mean over ranks of what one sends. A pattern is mixed with the even exchange of the",
        "same total by its dial; 1 is the pattern alone: `hot_receiver`, all send to rank 0; `hot_sender`, rank 0 sends to",
        "all; `permutation`, rank r sends to r + 1; `few_pairs`, 1 sends to 0, 3 to 2, ...",
        "",
        ON_GPUS if "gpu" in about else ON_CPUS,
        "",
    ]
    for ranks in sorted({line["ranks"] for line in lines}):
        text += section([line for line in lines if line["ranks"] == ranks], ranks)
    return "\n".join(text)


def section(lines: Sequence[Line], ranks: int) -> list[str]:
    """Tables of one number of ranks."""
    even = {line["total_bytes"]: _median(line) for line in lines if line["pattern"] == "even"}
    skewed = {(x["pattern"], x["dial"], x["total_bytes"]): _median(x) for x in _fitted(lines)}
    if len(even) < 2 or not skewed or not _held_out(lines):
        raise UserError(f"samples of {ranks} ranks lack even, skewed or held-out exchanges; measure again")
    sizes = sorted(even)
    text = [f"## {ranks} ranks", "", f"| pattern | dial | skew | {' | '.join(_size(s) for s in sizes)} |"]
    text += ["|" + " --- |" * (3 + len(sizes)), f"| even | 0 | 1.00 | {' | '.join(f'{even[s]:.0f}' for s in sizes)} |"]
    for pattern, dial in dict.fromkeys((pattern, dial) for pattern, dial, _ in skewed):
        cells = [f"{skewed[pattern, dial, s]:.0f} ({skewed[pattern, dial, s] / even[s]:.2f})" for s in sizes]
        mean, port, _ = loads_of(Exchange(sizes[-1], pattern, dial).rows_GG(ranks))
        text.append(f"| {pattern} | {dial:g} | {port / mean:.2f} | {' | '.join(cells)} |")
    return [*text, "", *law(lines, ranks), ""]


def law(lines: Sequence[Line], ranks: int) -> list[str]:
    """The law of calibration/skew.py fitted to the skewed cases; its held-out errors beside those of laws without a fit."""
    fitted, unseen, balanced_B2 = _fitted(lines), _held_out(lines), balanced(lines, ranks)
    a, b = fit_weights(balanced_B2, _loads(fitted, ranks), _medians(fitted), ranks)
    name = f"mean + {a:.2f} (port - mean)"
    laws = {"mean: only the total counts": (0.0, 0.0), "busiest port": (1.0, 0.0)}
    if ranks > 2:  # of two ranks the largest pair is the busiest port
        name += f" + {b:.2f} max({ranks - 1} pair - port, 0)"
        laws[f"busiest port or {ranks - 1} x the largest pair"] = (1.0, 1.0)
    laws = {name: (a, b)} | laws
    patterns = list(dict.fromkeys(x["pattern"] for x in unseen))
    text = [
        "Law: a skewed exchange takes the time of an even one of so many rows from each rank. Fitted to "
        f"{len(fitted)} cases and",
        f"held against {len(unseen)} that it has not seen, at other sizes and another dial. Errors of medians in per cent:",
        "",
        f"| law | fitted, median | held out, median | held out, p90 | {' | '.join(patterns)} |",
        "|" + " --- |" * (4 + len(patterns)),
    ]
    for name, weights in laws.items():
        errors, apart = (_errors(balanced_B2, part, ranks, weights) for part in (fitted, unseen))
        each = [np.median([e for e, x in zip(apart, unseen, strict=True) if x["pattern"] == p]) for p in patterns]
        cells = [np.median(errors), np.median(apart), np.quantile(apart, 0.9), *each]
        text.append(f"| {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    halves = [100 * abs(np.median(x["us"][::2]) / np.median(x["us"][1::2]) - 1) for x in unseen]
    return [
        *text,
        "",
        f"Medians of every second call differ from those of the others by {np.median(halves):.1f} % in the median and "
        f"{np.quantile(halves, 0.9):.1f} %",
        "at p90: no law can be much nearer.",
    ]


def _fitted(lines: Sequence[Line]) -> list[Line]:
    return [x for x in lines if x["pattern"] != "even" and not x["held_out"]]


def _held_out(lines: Sequence[Line]) -> list[Line]:
    return [x for x in lines if x["held_out"]]


def balanced(lines: Sequence[Line], ranks: int) -> Float:
    """[even cases, (rows from each rank, time)], rising, made non-decreasing in time."""
    even = sorted((x for x in lines if x["pattern"] == "even"), key=lambda x: x["total_bytes"])
    return np.stack([_loads(even, ranks)[:, 0], isotonic(_medians(even))], axis=1)


def _errors(balanced_B2: Float, lines: Sequence[Line], ranks: int, weights: tuple[float, float]) -> Float:
    return 100 * np.abs(skewed_us(balanced_B2, _loads(lines, ranks), ranks, *weights) / _medians(lines) - 1)


def _loads(lines: Sequence[Line], ranks: int) -> Float:
    cases = [Exchange(x["total_bytes"], x["pattern"], x["dial"]) for x in lines]
    return np.array([loads_of(case.rows_GG(ranks)) for case in cases])


def _medians(lines: Sequence[Line]) -> Float:
    return np.array([_median(x) for x in lines])


def _median(line: Line) -> float:
    return float(np.median(line["us"]))


def _size(total_bytes: int) -> str:
    kib = total_bytes >> 10
    return f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"


def read_samples(file: Path) -> list[Line]:
    """Lines of a file of raw samples; UserError for anything else."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        right = lines and "environment" in lines[0]
        right = right and all({"ranks", "pattern", "dial", "total_bytes", "held_out", "us"} <= set(x) for x in lines)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: not raw samples of make skew ({error})") from None
    if not right:
        raise UserError(f"{file}: not raw samples of make skew")
    return lines
