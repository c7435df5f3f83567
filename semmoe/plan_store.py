"""PlanStore: placements and planned figures on disk, so that nobody plans again what is planned already.

`semmoe measure` finds what `semmoe simulate` of the same configuration planned, one experiment what another did. A file
is named by a digest of all that its content depends on: the configuration's part, the trace's content, and the source of
this package. Policies from elsewhere are not kept: what they read is not ours to know.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .files import read_arrays, replacing, write_atomically
from .placement.base import Placement
from .specs import digest


class PlanStore:
    """folder: where the files lie (made when needed); None: nothing is kept. renew: what lies there is made again."""

    def __init__(self, folder: Path | None = None, renew: bool = False) -> None:
        self.folder, self.renew = folder, renew

    def placement(self, key: Any, make: Callable[[], Placement]) -> Placement:
        """The placement of this key, from disk or made and kept."""
        path = self._path("placement", key, ".npz")
        if path and path.is_file() and not self.renew:
            with contextlib.suppress(UserError, KeyError, ValueError):  # a damaged file is made again
                return _loaded(path)
        made = make()
        if path:
            with replacing(path) as file:
                notes = {name: value for name, value in made.notes.items() if isinstance(value, int | float)}
                np.savez_compressed(file, physical_to_logical_LP=made.physical_to_logical_LP, ep_size=made.ep_size,
                                    layer_ids=made.layer_ids, num_experts=made.num_experts,
                                    notes=json.dumps(notes))  # fmt: skip
        return made

    def figures(self, key: Any, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The planned figures of this key, from disk or made and kept."""
        path = self._path("planned", key, ".json")
        if path and path.is_file() and not self.renew:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                known = json.loads(path.read_text(encoding="utf-8"))
                return {str(name): float(value) for name, value in known.items()}
        made = make()
        if path:
            write_atomically(path, json.dumps(made))
        return made

    def _path(self, kind: str, key: Any, suffix: str) -> Path | None:
        return self.folder / f"{kind}-{digest([source_digest(), key])}{suffix}" if self.folder else None


def is_ours(*groups: Any) -> bool:
    """Whether all these config groups name classes of this package (or none)."""
    return all(str(group.get("_target_") or "semmoe.").startswith("semmoe.") for group in groups)


@cache
def source_digest(folder: Path = Path(__file__).parent, suffixes: tuple[str, ...] = (".py",)) -> str:
    """Digest of the files of a package: another one where anything that could change a plan did."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in suffixes):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _loaded(path: Path) -> Placement:
    arrays = read_arrays(path, "placement", "remove it")
    return Placement(
        arrays["physical_to_logical_LP"],
        int(arrays["ep_size"]),
        tuple(arrays["layer_ids"].tolist()),
        int(arrays["num_experts"]),
        json.loads(str(arrays["notes"])),
    )
