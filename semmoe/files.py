"""Files that are whole or absent: every file that semmoe writes goes through here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import UserError


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or all of the new."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when all of it is on disk, and vanishes when anything stops that.

    UserError where the system refuses (no room, no permission, a file where a folder should be).
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); finished rows are kept, "
            "run the same command again to continue"
        ) from None
