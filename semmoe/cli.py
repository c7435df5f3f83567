"""The command line: the one place that starts simulator and harness, by name, when asked."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .errors import UserError, nearest
from .explain import explain_command
from .files import check_writable
from .plugins import add_working_directory, place_of, told

USAGE = """semmoe COMMAND [options] [key=value ...]

  semmoe simulate [-m] [key=value ...]    predict the configuration(s) in the simulator
  semmoe measure  [-m] [key=value ...]    run the same configuration(s) on real processes
  semmoe calibrate [key=value ...]        measure this machine's single operations into a cluster file
  semmoe compare RUN [RUN ...]            predicted beside measured, as a table and an HTML report
  semmoe place [key=value ...]            compute a placement and write it as JSON
  semmoe trace info|record|synthetic ...  look at, record or make routing traces
  semmoe check GROUP._target_=mod.Class   conformance of your own policy, and its figures beside the built-ins
  semmoe validate [data=DIR|FILE]         the cost model against public measurements that it was not fitted to
  semmoe advise [html=FILE] [key=value ...]         does it pay here? one page: gains with intervals, costs, levers
  semmoe slo [slo=paper|absolute] [key=value ...]   throughput under SLO, by bisection over the request rate
  semmoe timeline [out=DIR] [key=value ...]         a simulated run for Perfetto, with its pair traffic
  semmoe breakeven [clusters=A,B] [key=value ...]   from which LAR and batch size on locality pays
  semmoe evaluate policies [--trace ...]  every policy on held-out routes, with spread
  semmoe policies                         every policy that can be named, with what it does

`-m` sweeps over comma-separated values: semmoe simulate -m placement=contiguous,semantic request_scheduler=round_robin
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit status: 0, 2 for what a user can put right, 1 for anything else, 130 and 143 when stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    try:
        status = _run(words)
        if sys.stdout is not None:  # None: closed by the shell, as with `>&-`
            sys.stdout.flush()  # or a reader that went away shows at the interpreter's end only
        return status
    except KeyboardInterrupt as stop:
        return _stopped(command, stop)
    except SystemExit as stop:  # of --help and of wrong options; a policy must not end the command without a word
        if not (where := place_of(stop)):
            raise
        _say(command, f"{where}ended the command (SystemExit: {stop})")
        return 1
    except BrokenPipeError:  # the reader of our output went away, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        _say(command, str(error))
        return 2
    except OSError as error:
        _say(command, f"{error.filename or 'a file'}: {error.strerror or error}")
        return 2
    except MemoryError as error:
        _say(command, f"out of memory ({error or 'no details'}); use fewer tokens, requests or ranks, or model_scale")
        return 1
    except Exception as error:
        within = _stop_within(error)
        if within is not None:
            return _stopped(command, within)
        where = place_of(error)
        if where:  # inside a policy of the user's own
            _say(command, f"{where}{told(error)}")
        else:
            traceback.print_exc()
            _say(command, "this is a fault of semmoe, not of your input; please report it with the lines above")
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"semmoe {__version__}")
        return 0
    command, rest = words[0], words[1:]
    add_working_directory()
    if command not in COMMANDS:
        raise UserError(f"no such command{nearest(command, COMMANDS)}; semmoe --help explains them")
    if command in CONFIGURED and {"-h", "--help"} & set(rest):
        print(explain_command(command, COMMANDS[command].__doc__ or ""))
        return 0
    with _ended_by_sigterm():
        return COMMANDS[command](rest) or 0


def _stop_within(error: BaseException | None) -> KeyboardInterrupt | None:
    """The stop that came while a compiled kernel handed over its result: a SystemError, or several, is wrapped around it."""
    while isinstance(error, SystemError):
        error = error.__cause__
    return error if isinstance(error, KeyboardInterrupt) else None


def _stopped(command: str, stop: KeyboardInterrupt) -> int:
    name = stop.args[0] if stop.args else "interrupted"
    _say(command, f"{name}; {KEPT.get(command, 'nothing was kept, the same command starts anew')}")
    return 143 if stop.args else 130


def _say(command: str, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"semmoe {command}: {text}", file=sys.stderr)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that ranks end and half-written files go."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("terminated")

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _overrides(rest: Sequence[str]) -> tuple[list[str], bool]:
    flags = {"-m", "--multirun"}
    unknown = [word for word in rest if word.startswith("-") and word not in flags]
    if unknown:
        raise UserError(f"unknown option {unknown[0]}; options are -m, --help and key=value overrides")
    return [word for word in rest if word not in flags], any(word in flags for word in rest)


def _backend(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("torch", "triton", "safetensors", "transformers", "tokenizers"):
            raise UserError(f"{error.name} is not installed; pip install 'semmoe[{extra}]'") from None
        raise


def simulate(rest: Sequence[str]) -> int:
    """Predict configurations in the simulator; one row each goes to results_dir/name. -m sweeps over commas."""
    from .session import simulate_all

    overrides, multirun = _overrides(rest)
    return simulate_all(overrides, multirun, _backend("simulator.app", "harness"))


def measure(rest: Sequence[str]) -> int:
    """Run configurations on real processes; one row each and repeat goes to results_dir/name. -m sweeps over commas."""
    from .session import measure_all

    overrides, multirun = _overrides(rest)
    return measure_all(overrides, multirun, _backend("harness.app", "harness"))


def calibrate(rest: Sequence[str]) -> int:
    """Measure this machine's single operations and write the file that cluster=local reads."""
    from .builder import RunBuilder
    from .config import compose_all

    overrides, _ = _overrides(rest)
    configs = compose_all([*overrides, "planned_folds=0"])
    if len(configs) != 1:
        raise UserError(
            f"calibrate measures for one model and dtype; the overrides describe {len(configs)} runs: add sweep=[]"
        )
    cluster = configs[0]["cluster"]
    if not (file := cluster.get("file")):
        raise UserError(f"cluster={cluster.get('name')} has no `file` to write; semmoe calibrate needs cluster=local")
    run = RunBuilder().build(configs[0] | {"cluster": cluster | {"file": None}})  # what lies there already says nothing
    _backend("harness.app", "harness").calibrate(run, file)
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
    for path in (options.html, options.csv):
        if path is not None:
            check_writable(path)
    comparison = join(options.runs)
    print(comparison.render())
    if options.csv:
        comparison.to_csv(options.csv)
    first = Path(options.runs[0])
    html = options.html or (first if first.is_dir() else first.parent) / "report.html"
    write_report(comparison, html, f"semmoe: {first.resolve().name}", "semmoe compare " + shlex.join(rest))
    print(f"report: {html}")
    return 0


def place(rest: Sequence[str]) -> int:
    """Compute one placement, write it as JSON beside the runs and print what it is expected to give."""
    from .session import place_one

    overrides, _ = _overrides(rest)
    return place_one(overrides)


def validate(rest: Sequence[str]) -> int:
    return int(_backend("simulator.validate", "harness").main(rest))


def advise(rest: Sequence[str]) -> int:
    """Say whether semantic parallelism pays for a model, cluster and traffic. html=FILE writes the page too."""
    return int(_backend("simulator.advise.app", "harness").main(rest))


def slo(rest: Sequence[str]) -> int:
    """Find the highest request rate of one configuration that keeps the SLO."""
    return int(_backend("simulator.slo", "harness").main(rest) or 0)


def timeline(rest: Sequence[str]) -> int:
    """Simulate one configuration and write its steps for Perfetto."""
    return int(_backend("simulator.timeline_trace", "harness").main(rest) or 0)


def breakeven(rest: Sequence[str]) -> int:
    """Map of the LAR and batch size from which locality pays, cluster by cluster, through the cost model."""
    return int(_backend("simulator.breakeven", "harness").main(rest) or 0)


def evaluate(rest: Sequence[str]) -> int:
    from .evaluate import main as evaluate_main

    if rest[:1] != ["policies"]:
        raise UserError("semmoe evaluate policies [--trace tiny|gptoss|FILE] [--out FILE.md] is right; --help explains")
    return evaluate_main(rest[1:])


def check(rest: Sequence[str]) -> int:
    """Conformance suite of the policy that GROUP._target_=module.Class names, and its figures beside the built-ins."""
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


# what is there of a command that was stopped
KEPT = dict.fromkeys(("simulate", "measure"), "finished rows are kept, the same command continues") | {
    "slo": "rows of finished rates are kept, the same command starts anew",
    "advise": "placements are kept, the same command starts anew from them",
}
# commands that take key=value of the config
CONFIGURED = ("simulate", "measure", "calibrate", "place", "check", "slo", "timeline", "breakeven", "advise")
COMMANDS = {
    "simulate": simulate,
    "measure": measure,
    "calibrate": calibrate,
    "compare": compare,
    "place": place,
    "check": check,
    "validate": validate,
    "evaluate": evaluate,
    "advise": advise,
    "slo": slo,
    "timeline": timeline,
    "breakeven": breakeven,
    "trace": trace,
    "policies": policies,
}

if __name__ == "__main__":
    sys.exit(main())
