"""StepLog: the step plans of a served run and how long each took, so that the other backend can re-execute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..files import read_arrays, replacing, single
from .stepplan import StepPlan, TokenRows

SCHEMA_VERSION = 1
COLUMNS = ("rank", "request", "phase", "start", "count")
SHAPES = dict.fromkeys(("offset", "index", "token_start", *COLUMNS), "iu") | {"duration_ms": "f", "now_ms": "f"}
PERIOD = "token_period"  # optional: of requests that go through their traced one again
MOST = 1 << 53  # larger than any time or row


@dataclass(frozen=True, eq=False)
class StepLog:
    """Executed plans in order. tokens: trace rows of every request (see StepPlan.token_rows).

    duration_ms_S and now_ms_S: how long step s took, and when it began on the run's clock. config_id: whose run it was.
    """

    config_id: str
    plans: list[StepPlan]
    duration_ms_S: NDArray[np.float64]
    now_ms_S: NDArray[np.float64]
    tokens: TokenRows

    def token_rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(trace rows, queue of each token) of every step: what StepPlanner.route takes."""
        for plan in self.plans:
            yield plan.token_rows(self.tokens)

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
                token_start=self.tokens.start_R,
                **({} if self.tokens.period_R is None else {PERIOD: self.tokens.period_R}),  # type: ignore[arg-type]
                **columns,  # type: ignore[arg-type]
            )
        return path

    @classmethod
    def load(cls, path: str | Path) -> StepLog:
        """Read a log; UserError for a file that is none."""
        raw = read_arrays(path, "step log", "`semmoe measure workload=serve` writes one beside each row")
        version = single(raw, "schema_version", "iu", path) if "schema_version" in raw else SCHEMA_VERSION
        if version != SCHEMA_VERSION:
            raise UserError(f"{path}: schema version {version}; this release reads version {SCHEMA_VERSION}")
        missing = [name for name in ("schema_version", "config_id", *SHAPES) if name not in raw]
        if missing:
            raise UserError(f"{path}: lacks {', '.join(missing)}; measure the run again")
        config_id = single(raw, "config_id", "U", path)
        _validate(raw, path)
        offset, columns = raw["offset"], [raw[name] for name in COLUMNS]
        plans = [
            StepPlan(int(index), *(column[offset[s] : offset[s + 1]] for column in columns))
            for s, index in enumerate(raw["index"])
        ]
        return cls(config_id, plans, raw["duration_ms"], raw["now_ms"], TokenRows(raw["token_start"], raw.get(PERIOD)))


def _validate(raw: dict[str, Any], path: str | Path) -> None:
    """UserError naming the first array that cannot be part of a log."""
    for name, kinds in SHAPES.items():
        if raw[name].ndim != 1 or raw[name].dtype.kind not in kinds:
            raise UserError(f"{path}: {name} holds {raw[name].dtype} of shape {raw[name].shape}; measure the run again")
    steps, entries = len(raw["index"]), len(raw["rank"])
    offset, lengths = raw["offset"], {"duration_ms": steps, "now_ms": steps} | dict.fromkeys(COLUMNS, entries)
    if len(offset) != steps + 1 or offset[0] != 0 or offset[-1] != entries or (np.diff(offset) < 0).any():
        raise UserError(f"{path}: offset does not divide {entries} entries into {steps} steps; measure the run again")
    lowest = {"count": 1, "index": 0, "duration_ms": 0, "now_ms": 0, "token_start": 0} | dict.fromkeys(COLUMNS[:-1], 0)
    highest = {"phase": 1, "request": len(raw["token_start"]) - 1}
    for name, low in lowest.items():
        values, high = raw[name], highest.get(name, MOST)
        if len(values) != lengths.get(name, len(values)):
            raise UserError(f"{path}: {name} has {len(values)} values, not {lengths[name]}; measure the run again")
        if not ((values >= low) & (values <= high)).all():
            raise UserError(f"{path}: {name} holds values outside {low}..{high}; measure the run again")
    period = raw.get(PERIOD)
    if period is not None:
        right = period.dtype.kind in "iu" and period.shape == raw["token_start"].shape and (period >= 1).all()
        if not right:
            raise UserError(f"{path}: {PERIOD} must hold one length of at least 1 a request; measure the run again")


def step_log_path(folder: str | Path, config_id: str, repeat: int) -> Path:
    """File of a run's log, beside its rows."""
    return Path(folder) / f"steps-{config_id}-r{repeat}.npz"
