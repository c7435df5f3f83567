"""The folder that the ranks of one pool share, which goes with the pool; and those of pools that had no time to remove theirs.

A pool holds a lock on the file `owner` of its folder for as long as it lives. The system frees the lock of a process that
was killed, in whatever container it ran, so a folder whose lock can be had belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

PREFIX = "semmoe-ranks-"
OWNER = "owner"
SHARED_MEMORY_BYTES = 1 << 30  # containers often get 64 MiB of /dev/shm, and writing past it kills a process


class Scratch:
    """A new folder in shared memory where there is room, else in the usual temporary folder. Making one removes the folders
    that killed pools left there."""

    def __init__(self) -> None:
        root = _shared_memory_folder() or tempfile.gettempdir()
        for left in _abandoned(Path(root)):
            shutil.rmtree(left, ignore_errors=True)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=root)
        locking = os.path.join(self.path, f".{OWNER}")
        self._owner: int | None = os.open(locking, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody will take the folder for abandoned
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            os.rename(locking, os.path.join(self.path, OWNER))  # nobody sees the file before it is locked

    def remove(self) -> None:
        """May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def _abandoned(root: Path) -> Iterator[Path]:
    """Folders whose pool has ended. One without the file `owner` is being made; one of another user cannot be opened."""
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            file = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(file)


def _shared_memory_folder() -> str | None:
    """/dev/shm where the machine has room there: buffers of ranks stay in memory."""
    try:
        roomy = psutil.disk_usage("/dev/shm").free > SHARED_MEMORY_BYTES
    except OSError:
        return None
    return "/dev/shm" if roomy and os.access("/dev/shm", os.W_OK) else None
