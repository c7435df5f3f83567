"""Regenerates results/paper/: `python -m simulator.paper [--only NAME ...] [--again] [--reduced] [--out DIR]` (`make paper`).

Each page is a figure or table of the paper, or one that it lacks: NAME.md with the paper's figure, ours, the conditions
and a sentence on agreement, NAME.csv with every row. README.md gathers the sentences. A page that this very code and
configuration made is kept unless --again is given, so a stopped run continues at the page where it stopped; plans are
shared by all pages and kept in results/runs/plans. --reduced: few short requests of one model, in seconds;
tests/simulator/test_paper.py compares it with results/paper/reduced.csv.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import semmoe
from semmoe.builder import RunBuilder
from semmoe.config import conf_dir
from semmoe.errors import UserError, nearest
from semmoe.files import write_atomically
from semmoe.plan_store import PlanStore, source_digest
from semmoe.specs import digest

from .affinity import accuracy_by_layer, drift, transfer
from .book import Book, Page, Table, kept, write
from .layers import ablation, communication, left_out, locality
from .served import latency, serving
from .verdicts import verdicts

RUNS = Path("results/runs")  # what is not committed: plans, and which code made the pages
PAGES: dict[str, Callable[[Book], Page]] = {
    "communication": communication,
    "locality": locality,
    "serving": serving,
    "latency": latency,
    "transfer": transfer,
    "accuracy": accuracy_by_layer,
    "left_out": left_out,
    "ablation": ablation,
    "drift": drift,
    "verdicts": verdicts,
}


def reduced_rows() -> Table:
    """The same code on a few rows, in seconds."""
    return kept(Book().rows("reduced")).drop(columns="config_id")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages asked for (all), and the README when all were."""
    parser = argparse.ArgumentParser(prog="python -m simulator.paper", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(PAGES), help=", ".join(PAGES))
    parser.add_argument("--again", action="store_true", help="make pages anew that this code made already")
    parser.add_argument("--reduced", action="store_true", help="the small version of the test: reduced.csv alone")
    parser.add_argument("--out", type=Path, default=Path("results/paper"))
    options = parser.parse_args(argv)
    if options.reduced:
        write_atomically(options.out / "reduced.csv", reduced_rows().to_csv(index=False, float_format="%.6g"))
        print(f"written: {options.out / 'reduced.csv'}")
        return 0
    for name in options.only:
        if name not in PAGES:
            raise UserError(f"no page {name}{nearest(name, PAGES)}")
    book, whole = Book(builder=RunBuilder(PlanStore(RUNS / "plans"))), time.perf_counter()
    made = _Made(RUNS / "paper-pages.json", options.out)
    for number, name in enumerate(options.only, 1):
        if made.knows(name) and not options.again:
            print(f"{name} ({number} of {len(options.only)}): made by this code already; kept (--again makes it anew)")
            continue
        print(f"{name} ({number} of {len(options.only)}) ...", flush=True)
        start, cpu = time.perf_counter(), time.process_time()
        page = PAGES[name](book)
        write(page, options.out, f"python -m simulator.paper --only {name}")
        made.add(name)
        took = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of processor"
        print(f"{name}: {took}\n{page.verdict}\n", flush=True)
    gather(options.out)
    print(f"written: {options.out} in {time.perf_counter() - whole:.0f} s")
    return 0


class _Made:
    """Which pages of a folder the present code, configuration and profiles made: digests by page in a file."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.file, self.folder = file, folder
        parts = ((Path(semmoe.__file__).parent, (".py", ".json")), (Path(__file__).parents[1], (".py", ".json")),
                 (conf_dir(), (".yaml",)))  # fmt: skip
        self.now = digest([source_digest(*part) for part in parts])

    def knows(self, name: str) -> bool:
        there = all((self.folder / f"{name}.{kind}").is_file() for kind in ("md", "csv"))
        return there and self._read().get(self._key(name)) == self.now

    def add(self, name: str) -> None:
        write_atomically(self.file, json.dumps(self._read() | {self._key(name): self.now}, indent=1))

    def _key(self, name: str) -> str:
        return str((self.folder / name).resolve())

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def gather(folder: Path) -> None:
    """README.md: the sentences of every page that is there."""
    lines = [
        "# The paper, done again\n",
        "Made by `make paper` (`python -m simulator.paper`). *Semantic Parallelism* (Sem-MoE, arXiv 2503.04398, ICLR 2026). "
        "No public code, hardware name, lengths or routes exist, so these are the paper's experiments on routes drawn from "
        "affinity profiles (`semmoe/assets/profiles`, fitted to its recall and EP4 LAR alone) and on a model of the machine "
        "that its text fits best (8 x H20, 96 GB). They test whether its figures follow from one another, not whether its "
        "machine did what it says.\n",
    ]
    for name in PAGES:
        file = folder / f"{name}.md"
        if file.is_file():
            text = file.read_text(encoding="utf-8").strip()
            title, verdict = text.splitlines()[0].removeprefix("# "), text.split("\n\n")[-1]
            lines.append(f"## [{title}]({name}.md)\n\n{verdict}\n")
    missing = [name for name in PAGES if not (folder / f"{name}.md").is_file()]
    if missing:
        lines.append(
            f"Not run yet here: {', '.join(missing)} (`python -m simulator.paper --only {' '.join(missing)}`).\n"
        )
    write_atomically(folder / "README.md", "\n".join(lines))
