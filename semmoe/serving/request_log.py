"""RequestLog: arrivals, lengths and shared prefixes of requests that a real service saw, read from CSV or JSON lines.

A row is a request. Columns, by whichever of these names a file has:

    arrival   arrival_ms; arrival_s, queued_ts, Timestamp (seconds); timestamp (milliseconds); TIMESTAMP (date and time)
    prompt    prompt_len, input_length, input_toks, ContextTokens, "Request tokens"         tokens
    output    output_len, output_length, output_toks, GeneratedTokens, "Response tokens"    tokens
    prefix    hash_ids, optional: one id per KV block of the prompt; equal ids mean equal prompts up to the block's end.
              A list in JSON lines, ids parted by blanks in CSV

so that the public traces of Mooncake, BurstGPT, the Azure LLM inference trace and LLMServingSim can be read as they are.
Requests without output (failed ones) are left out. Times count from the first arrival.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

ARRIVAL_TO_MS = {
    "arrival_ms": 1.0,
    "arrival_s": 1e3,
    "queued_ts": 1e3,
    "Timestamp": 1e3,
    "timestamp": 1.0,
    "TIMESTAMP": 0.0,  # a date and time
}
PROMPT = ("prompt_len", "input_length", "input_toks", "ContextTokens", "Request tokens")
OUTPUT = ("output_len", "output_length", "output_toks", "GeneratedTokens", "Response tokens")
PREFIX = "hash_ids"


@dataclass(frozen=True, eq=False)
class RequestLog:
    """Requests in order of arrival. prefix_ids: per request the ids of its prompt's KV blocks (empty: none known)."""

    path: str
    arrival_ms_R: NDArray[np.float64]
    prompt_R: NDArray[np.int64]
    output_R: NDArray[np.int64]
    prefix_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def load(cls, path: str | Path) -> RequestLog:
        """Read a log; UserError names the file, the line and what is wrong."""
        path = Path(path)
        rows = list(_rows(path))
        if not rows:
            raise UserError(f"{path}: holds no request")
        arrival, prompt, output = (_named(rows[0][1], names, what, path) for names, what in _WANTED)
        kept = []
        for line, row in rows:
            where = f"{path}, line {line}"
            made = _length(row, output, where)
            if made:
                kept.append((_arrival_ms(row, arrival, where), _length(row, prompt, where), made, _ids(row, where)))
        if not kept:
            raise UserError(f"{path}: no request has any output token")
        kept.sort(key=lambda request: request[0])
        times, prompts, outputs, ids = zip(*kept, strict=True)
        if min(prompts) < 1:
            raise UserError(f"{path}: a request has an empty prompt; prompts of at least one token are right")
        first = np.asarray(times, dtype=np.float64)
        return cls(str(path), first - first[0], np.array(prompts), np.array(outputs), tuple(ids))

    def __len__(self) -> int:
        return len(self.prompt_R)

    def arrivals_ms(self, rate_rps: float | None) -> NDArray[np.float64]:
        """The log's own times; with a rate, the same pattern at that mean rate (requests over the span of arrivals)."""
        span_ms = float(self.arrival_ms_R[-1])
        if rate_rps is None or len(self) < 2 or span_ms == 0:
            return self.arrival_ms_R
        return self.arrival_ms_R * ((len(self) - 1) / rate_rps * 1e3 / span_ms)

    def first(self, count: int | None) -> RequestLog:
        """The first `count` requests; None: all. UserError where the log has fewer."""
        if count is None or count == len(self):
            return self
        if count > len(self):
            raise UserError(f"workload.num_requests={count}, but {self.path} holds {len(self)} requests")
        parts = (self.arrival_ms_R[:count], self.prompt_R[:count], self.output_R[:count], self.prefix_ids[:count])
        return RequestLog(self.path, *parts)


def log_digest(path: str | Path) -> str:
    """Short hash of a log's content: part of a config id."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise UserError(f"workload.log={path}: cannot be read ({error.strerror or error})") from None


_WANTED = ((tuple(ARRIVAL_TO_MS), "arrival"), (PROMPT, "prompt length"), (OUTPUT, "output length"))


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, row) of a CSV file with a header, or of a file of JSON objects, one a line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise UserError(f"workload.log={path}: cannot be read ({told}); a CSV or JSON-lines file is right") from None
    if not text.lstrip().startswith("{"):
        yield from enumerate(csv.DictReader(text.splitlines()), 2)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: holds a {type(row).__name__}; one JSON object a line is right")
        yield number, row


def _named(row: Mapping[str, Any], names: tuple[str, ...], what: str, path: Path) -> str:
    found = next((name for name in names if name in row), None)
    if found is None:
        raise UserError(f"{path}: no column for the {what} among {', '.join(map(str, row))}; name it {names[0]}")
    return found


def _arrival_ms(row: Mapping[str, Any], name: str, where: str) -> float:
    try:
        if name == "TIMESTAMP":
            return datetime.fromisoformat(str(row[name])[:26]).timestamp() * 1e3
        time_ms = float(row[name]) * ARRIVAL_TO_MS[name]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}: {name}={row.get(name)!r} is no time") from None
    if not np.isfinite(time_ms):
        raise UserError(f"{where}: {name}={row[name]!r} must be finite")
    return time_ms


def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    try:
        value = float(row[name])
        if value < 0 or value != int(value) or value > 1 << 31:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{where}: {name}={row.get(name)!r} is no number of tokens") from None
    return int(value)


def _ids(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    raw = row.get(PREFIX) or ()
    try:
        return tuple(int(word) for word in (raw.split() if isinstance(raw, str) else raw))
    except (TypeError, ValueError):
        raise UserError(f"{where}: {PREFIX}={raw!r} must be whole numbers") from None
