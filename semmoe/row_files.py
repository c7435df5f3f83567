"""Result rows as files: one a run and repeat, written atomically, so that a stopped sweep leaves whole rows and continues where
it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import UserError
from .files import write_atomically
from .results import COLUMNS, check_row


def row_path(folder: str | Path, row: Mapping[str, Any]) -> Path:
    """File of a row: one per backend, transport, cluster, configuration and repeat."""
    side = row["backend"] if row["backend"] == "simulator" else f"{row['backend']}-{row['transport']}"
    return Path(folder) / f"{side}-{row['cluster']}-{row['config_id']}-r{row['repeat']}.json"


def write_row(folder: str | Path, row: Mapping[str, Any]) -> Path:
    """Check and write one row atomically; UserError when that fails (full disk: nothing half-done)."""
    path = row_path(folder, row)
    text = json.dumps(check_row(row, str(path)), indent=1, allow_nan=False)
    write_atomically(path, text)
    return path


def read_row(file: str | Path) -> dict[str, Any]:
    """One row file, checked; UserError for anything that is none."""
    file = Path(file)
    remedy = "delete the file and run the command again"
    try:
        row = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(row, dict):
            raise TypeError(f"holds a {type(row).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: not a result row ({error}); {remedy}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
    try:
        return check_row(row, str(file))
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def read_rows(folders: Iterable[str | Path]) -> pd.DataFrame:
    """All rows of these run folders (or single row files) as one table with every column of the schema."""
    rows = []
    for folder in folders:
        folder = Path(folder)
        if not folder.exists():
            raise UserError(f"{folder}: no such run; `semmoe simulate` and `semmoe measure` write to results/runs/NAME")
        files = [folder] if folder.is_file() else sorted(folder.glob("*-r*.json"))
        rows += [read_row(file) for file in files]
    if not rows:
        raise UserError(
            f"{', '.join(str(f) for f in folders)}: holds no result rows; `semmoe simulate` and `semmoe measure` write them"
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))
