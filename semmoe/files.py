"""Files that are whole or absent: every file that semmoe writes goes through here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

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
    if not path.name:
        raise UserError(f"'{path}' is a folder; the name of a file to write is right")
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


def check_writable(path: str | Path) -> None:
    """UserError where a file could not be written: asked before work that takes long. Nothing is left behind."""
    path = Path(path)
    missing = [folder for folder in path.parents if not folder.exists()]
    probe = path.parent / f".{os.getpid()}.probe"
    try:
        if not path.name or path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"'{path}' cannot be written ({error.strerror}); name a file in a folder of yours") from None
    finally:
        for folder in missing:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()


def read_arrays(path: str | Path, what: str, remedy: str) -> dict[str, Any]:
    """All arrays of an .npz without pickles. UserError for a file that is none, whole or in part.

    what, remedy: for the message ("trace", "`semmoe trace record` makes one").
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such {what} file; {remedy}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # zip, zlib, the array header and its parser each raise kinds of their own
        told = " ".join(f"{error or type(error).__name__}".split())
        raise UserError(f"{path}: not a readable .npz {what} ({told}); {remedy}") from None


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """The JSON object of a file, with or without a byte-order mark. UserError for a file that is missing or holds none.

    remedy: for the message ("give a Hugging Face config.json or its directory").
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not an object {{...}}; {remedy}")
    return content


def single(arrays: Mapping[str, Any], name: str, kinds: str, where: str | Path) -> Any:
    """The one value of a scalar entry whose dtype is of one of these numpy kinds ("iu", "U"); UserError otherwise."""
    value = np.asarray(arrays[name])
    if value.shape != () or value.dtype.kind not in kinds:
        right = "one string" if kinds == "U" else "one whole number"
        raise UserError(f"{where}: {name} holds {value.dtype} of shape {value.shape}; {right} is right")
    return value.item()
