"""StepLog: the step plans of a served run and how long each took, so that the other backend can re-execute them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import UserError
from .files import replacing
from .serving import StepPlan

SCHEMA_VERSION = 1
COLUMNS = ("rank", "request", "phase", "start", "count")


@dataclass(frozen=True, eq=False)
class StepLog:
    """Executed plans in order. token_start_R: first trace row of every request (see StepPlan.token_rows).

    duration_ms_S and now_ms_S: how long step s took, and when it began on the run's clock. config_id: whose run it was.
    """

    config_id: str
    plans: list[StepPlan]
    duration_ms_S: NDArray[np.float64]
    now_ms_S: NDArray[np.float64]
    token_start_R: NDArray[np.int64]

    def token_rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(trace rows, queue of each token) of every step: what StepPlanner.route takes."""
        for plan in self.plans:
            yield plan.token_rows(self.token_start_R)

    def save(self, path: str | Path) -> Path:
        """Write atomically as .npz without pickles."""
        path = Path(path)
        columns = {
            name: np.concatenate([getattr(p, f"{name}_N") for p in self.plans] or [np.zeros(0, dtype=np.int64)])
            for name in COLUMNS
        }
        offset = np.concatenate([[0], np.cumsum([len(p.rank_N) for p in self.plans], dtype=np.int64)])
        with replacing(path) as file:
            np.savez_compressed(
                file,
                schema_version=np.int64(SCHEMA_VERSION),
                config_id=np.str_(self.config_id),
                offset=offset,
                index=np.array([p.index for p in self.plans], dtype=np.int64),
                duration_ms=self.duration_ms_S,
                now_ms=self.now_ms_S,
                token_start=self.token_start_R,
                **columns,  # type: ignore[arg-type]
            )
        return path

    @classmethod
    def load(cls, path: str | Path) -> StepLog:
        """Read a log; UserError for a file that is none."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: no such step log; `semmoe measure workload=serve` writes one beside each row")
        try:
            with np.load(path, allow_pickle=False) as file:
                raw = {name: file[name] for name in file.files}
            version = int(raw["schema_version"])
            if version != SCHEMA_VERSION:
                raise UserError(f"{path}: schema version {version}; this release reads version {SCHEMA_VERSION}")
            offset, columns = raw["offset"], [raw[name] for name in COLUMNS]
            plans = [
                StepPlan(int(index), *(column[offset[s] : offset[s + 1]] for column in columns))
                for s, index in enumerate(raw["index"])
            ]
            return cls(str(raw["config_id"]), plans, raw["duration_ms"], raw["now_ms"], raw["token_start"])
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: not a readable step log ({error}); measure the run again") from None


def step_log_path(folder: str | Path, config_id: str, repeat: int) -> Path:
    """File of a run's log, beside its rows."""
    return Path(folder) / f"steps-{config_id}-r{repeat}.npz"
