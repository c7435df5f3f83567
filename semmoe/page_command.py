"""Command line of a results page: `python -m semmoe.NAME RUN [RUN ...] [--out FILE] [--command TEXT]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import UserError
from .files import write_atomically

Page = tuple[str, Sequence[str]]  # Markdown, and the lines that the terminal shows


def write_page(
    name: str, about: str, make: Callable[[list[Path], str], Page], argv: Sequence[str] | None = None
) -> int:
    """Write results/NAME.md (or --out) as `make(run folders, command that made it)` says. Exit status: 2 for bad input."""
    target = f"make {name.replace('_', '-')}"
    parser = argparse.ArgumentParser(prog=f"python -m semmoe.{name}", description=about.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help=f"run folders (results/runs/{name}), those of replays too")
    parser.add_argument("--out", type=Path, default=Path(f"results/{name}.md"))
    parser.add_argument("--command", default=target, help="what to name as the command that made it")
    options = parser.parse_args(argv)
    try:
        text, said = make(options.runs, options.command)
        write_atomically(options.out, text)
    except UserError as error:
        print(f"semmoe {name}: {error}", file=sys.stderr)
        return 2
    for line in said:
        print(line)
    print(f"written: {options.out}")
    return 0
