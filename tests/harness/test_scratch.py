"""Folders of ranks: one goes with its pool, one of a pool that was killed goes with the next pool, a living one stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from harness import scratch
from harness.scratch import PREFIX, Scratch

ROOT = Path(__file__).resolve().parents[2]
KILLED = "import os; from harness.scratch import Scratch; print(Scratch().path, flush=True); os.kill(os.getpid(), {})"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The temporary folder, of processes that are started too."""
    monkeypatch.setattr(scratch, "_shared_memory_folder", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def ended_by(signal_number: int) -> Path:
    """The folder of a process that was ended in the middle of its run."""
    code = "import harness.scratch as s; s._shared_memory_folder = lambda: None; " + KILLED.format(signal_number)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert ended.returncode == -signal_number, ended.stderr
    return Path(ended.stdout.strip())


def test_the_next_pool_removes_what_a_killed_one_left_and_nothing_else(root):
    living = Scratch()
    left = ended_by(9)
    (left / "rendezvous").write_text("of ranks")
    made_now, other = root / f"{PREFIX}being-made", root / "elsewhere"
    for folder in made_now, other:
        folder.mkdir()
    assert left.is_dir() and left.parent == root
    after = Scratch()
    assert not left.exists()
    assert all(Path(folder).is_dir() for folder in (living.path, after.path, made_now, other))
    for pool in living, after:
        pool.remove()
        pool.remove()
    assert {path.name for path in root.iterdir()} == {made_now.name, other.name}


def test_without_locks_no_folder_is_taken_for_abandoned(root, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    first, second = Scratch(), Scratch()
    assert Path(first.path).is_dir() and Path(second.path).is_dir()
    for pool in first, second:
        pool.remove()
    assert not list(root.iterdir())
