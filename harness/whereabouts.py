"""Where ranks are when they do not answer: each writes its stack on a signal, which reaches it inside a library's call too.

    descriptor = listen()                                  every rank, once
    told(stacks_of({rank: (pid, descriptor), ...}))        -> (late ranks, where they are)

A rank that waits for others stands in a collective or a barrier; a late one elsewhere, and one that writes nothing is stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

ANSWER_S = 3.0  # to write a stack, on a busy machine
WAITS = ("/torch/distributed/", "/harness/transport/", "/harness/whereabouts.py")  # innermost frames of one that waits
INNERMOST = 3
LIBRARIES = ("/site-packages/", "/lib/python", "<frozen")
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>\S+)')
_FILES: list[IO[bytes]] = []  # kept open


class Frame(NamedTuple):
    file: str
    line: str
    name: str


def listen() -> int:
    """Descriptor of the nameless file that this process's stack goes to on SIGUSR1; -1 where there is no such signal."""
    if not hasattr(signal, "SIGUSR1"):
        return -1
    file = tempfile.TemporaryFile()  # noqa: SIM115
    _FILES.append(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    return file.fileno()


def stacks_of(listeners: Mapping[int, tuple[int, int]]) -> dict[int, list[Frame]]:
    """Frames of every rank, the innermost first; none of one that has ended or does not react. listeners: rank -> (process,
    descriptor that it listens with), of this machine."""
    asked: dict[int, Path] = {}
    for rank, (pid, descriptor) in listeners.items():
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
                asked[rank] = Path(f"/proc/{pid}/fd/{descriptor}")
    deadline = time.monotonic() + ANSWER_S
    said: dict[int, str] = {}
    whole = set[int]()
    while len(whole) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.1)
        for rank, path in asked.items():
            with contextlib.suppress(OSError):
                before, said[rank] = said.get(rank), path.read_text()
                if said[rank] and said[rank] == before:  # it is written frame by frame
                    whole.add(rank)
    return {rank: [Frame(*found) for found in _FRAME.findall(said.get(rank, ""))] for rank in listeners}


def told(stacks: Mapping[int, list[Frame]]) -> tuple[list[int], str]:
    """(ranks that are late: all where that cannot be told, a phrase that says where they are)."""
    late = [rank for rank, frames in stacks.items() if not _waits(frames)]
    late = late or list(stacks)
    return late, ", ".join(f"rank {rank} {_place(stacks[rank])}" for rank in late)


def _waits(frames: list[Frame]) -> bool:
    return any(part in frame.file for frame in frames[:INNERMOST] for part in WAITS)


def _place(frames: list[Frame]) -> str:
    """The innermost frame that is not a library's."""
    if not frames:
        return "has ended or is stopped"
    own = [frame for frame in frames if not any(part in frame.file for part in LIBRARIES)]
    file, line, name = (own or frames)[0]
    return f"is in {name} ({Path(file).name}:{line})"
