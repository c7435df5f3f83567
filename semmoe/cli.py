"""The command line: the one place that starts simulator and harness, by name, when asked."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .errors import UserError
from .plugins import add_working_directory

USAGE = """semmoe COMMAND [options] [key=value ...]

  semmoe simulate [-m] [key=value ...]    predict the configuration(s) in the simulator
  semmoe measure  [-m] [key=value ...]    run the same configuration(s) on real processes
  semmoe calibrate [key=value ...]        measure this machine's single operations into a cluster file
  semmoe compare RUN [RUN ...]            predicted beside measured, as a table and an HTML report
  semmoe place [key=value ...]            compute a placement and write it as JSON
  semmoe trace info|record|synthetic ...  look at, record or make routing traces
  semmoe check GROUP._target_=mod.Class   conformance of your own policy, and its figures beside the built-ins
  semmoe validate [data=DIR|FILE]         the cost model against public measurements that it was not fitted to
  semmoe policies                         every policy that can be named, with what it does

`-m` sweeps over comma-separated values: semmoe simulate -m placement=contiguous,semantic request_scheduler=round_robin
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; user errors print one message and give exit status 2, an interrupt 130."""
    add_working_directory()
    parser = argparse.ArgumentParser(prog="semmoe", usage=USAGE, add_help=True)
    parser.add_argument("--version", action="version", version=f"semmoe {__version__}")
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    try:
        return COMMANDS[options.command](options.rest) or 0
    except UserError as error:
        print(f"semmoe {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"semmoe {options.command}: interrupted; finished rows are kept, the same command continues",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        return 1


def _overrides(rest: Sequence[str]) -> tuple[list[str], bool]:
    flags = {"-m", "--multirun"}
    unknown = [word for word in rest if word.startswith("-") and word not in flags]
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; options are -m and key=value overrides")
    return [word for word in rest if word not in flags], any(word in flags for word in rest)


def _backend(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("torch", "triton", "safetensors", "transformers", "tokenizers"):
            raise UserError(f"{error.name} is not installed; pip install 'semmoe[{extra}]'") from None
        raise


def simulate(rest: Sequence[str]) -> int:
    from .session import simulate_all

    overrides, multirun = _overrides(rest)
    return simulate_all(overrides, multirun, _backend("simulator.app", "harness"))


def measure(rest: Sequence[str]) -> int:
    from .session import measure_all

    overrides, multirun = _overrides(rest)
    return measure_all(overrides, multirun, _backend("harness.app", "harness"))


def calibrate(rest: Sequence[str]) -> int:
    from .config import compose_all
    from .run import RunBuilder

    overrides, _ = _overrides(rest)
    (config,) = compose_all([*overrides, "planned_folds=0"])
    _backend("harness.app", "harness").calibrate(RunBuilder().build(config))
    return 0


def compare(rest: Sequence[str]) -> int:
    from .compare import compare as join
    from .report import write_report

    parser = argparse.ArgumentParser(
        prog="semmoe compare", description="Join simulated and measured rows by config id."
    )
    parser.add_argument("runs", nargs="+", help="run folders (results/runs/NAME) or row files")
    parser.add_argument("--html", type=Path, help="report file; default: report.html in the first run's folder")
    parser.add_argument("--csv", type=Path, help="also write the joined table as CSV")
    options = parser.parse_args(rest)
    comparison = join(options.runs)
    print(comparison.render())
    if options.csv:
        comparison.to_csv(options.csv)
    first = Path(options.runs[0])
    html = options.html or (first if first.is_dir() else first.parent) / "report.html"
    write_report(comparison, html, title=f"semmoe: {first.name}", command="semmoe compare " + " ".join(rest))
    print(f"report: {html}")
    return 0


def place(rest: Sequence[str]) -> int:
    from .session import place_one

    overrides, _ = _overrides(rest)
    return place_one(overrides)


def validate(rest: Sequence[str]) -> int:
    return int(_backend("simulator.validate", "harness").main(rest))


def check(rest: Sequence[str]) -> int:
    from .check import check as run_check

    overrides, _ = _overrides(rest)
    return run_check(overrides)


def trace(rest: Sequence[str]) -> int:
    from .trace_cli import main as trace_main

    return trace_main(rest)


def policies(rest: Sequence[str]) -> int:
    from .config import list_policies

    if rest:
        raise UserError("semmoe policies takes no arguments")
    print(list_policies())
    return 0


COMMANDS = {
    "simulate": simulate,
    "measure": measure,
    "calibrate": calibrate,
    "compare": compare,
    "place": place,
    "check": check,
    "validate": validate,
    "trace": trace,
    "policies": policies,
}

if __name__ == "__main__":
    sys.exit(main())
