"""Configurations side by side: one process a worker, rows as they are finished, one that fails stops no other.

Planning stays in the first process, so that errors of a config come first and a placement that is searched against a time
limit is the same on any number of workers. A worker gets a built Run and gives back its row.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from .errors import UserError
from .plugins import place_of, told
from .run import Run

Row = dict[str, Any]
Outcomes = Generator[tuple[int, Row | Exception], None, None]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def outcomes(simulator: Any, runs: Sequence[Run], workers: int) -> Outcomes:
    """(position in `runs`, its row or what went wrong) of every run, in the order in which they end.

    simulator: a module with simulate(run) -> row. With one worker or one run everything happens in this process. UserError
    where a worker process dies.
    """
    workers = min(workers, len(runs))
    if workers <= 1:
        for position, run in enumerate(runs):
            yield position, _attempt(simulator.simulate, run)
        return
    with _pool(workers) as pool:
        positions = {pool.submit(_in_worker, simulator.__name__, run): position for position, run in enumerate(runs)}
        for future in as_completed(positions):
            yield positions[future], _result(future, workers)


def _result(future: Future[Row | Exception], workers: int) -> Row | Exception:
    try:
        return future.result()
    except BrokenProcessPool:
        raise UserError(
            f"workers={workers}: a worker process was ended from outside (out of memory?); fewer workers need less memory"
        ) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return UserError(f"cannot be sent to a worker process ({error}); workers=1 is right for this policy")


def _attempt(simulate: Callable[[Run], Row], run: Run) -> Row | Exception:
    try:
        return simulate(run)
    except Exception as error:
        return error


def _in_worker(simulator: str, run: Run) -> Row | Exception:
    made = _attempt(importlib.import_module(simulator).simulate, run)
    if isinstance(made, dict | UserError | MemoryError | OSError):
        return made
    # frames do not travel with an exception
    where = place_of(made)
    return UserError(f"{where}{told(made)}") if where else RuntimeError("".join(traceback.format_exception(made)))


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that share the cores, and end with the block however it ends, or with this process."""
    share = str(max((os.cpu_count() or 1) // workers, 1))
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update({name: share for name, value in before.items() if value is None})
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _started)
    others = set(multiprocessing.active_children())
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]


def _started() -> None:
    """Ctrl-C is the first process's to handle; a worker whose first process is gone ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
