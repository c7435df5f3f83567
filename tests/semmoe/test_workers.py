"""Sweeps on several processes: the same rows in the same order, a failure or a stop loses nothing and leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import pytest

from semmoe import cli
from semmoe.workers import _result


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


FAULTY = """
import os
from semmoe.schedule.round_robin import RoundRobin
class Faulty(RoundRobin):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
    def assign(self, request, score_G, head_counts, ranks):
        if self.kind == "raises":
            raise ZeroDivisionError("of the policy")
        if self.kind == "dies":
            os._exit(9)
        return super().assign(request, score_G, head_counts, ranks)
"""
POLICY = ["simulate", "-m", "request_scheduler._target_=faulty_for_workers.Faulty", "planned_folds=0", "workload=serve"]
POLICY += ["workload.num_requests=6", "cluster.file=null"]


def test_rows_are_the_same_in_the_same_order_on_any_number_of_processes_and_one_that_fails_is_named(
    here, capsys, monkeypatch
):
    (here / "faulty_for_workers.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(here)
    sweep = [*POLICY, "+request_scheduler.kind=raises,good", "seed=0,1,2"]
    rows, lines = [], []
    for workers in (1, 3):
        assert cli.main([*sweep, f"workers={workers}", f"name=w{workers}"])
        out, err = capsys.readouterr()
        assert err.count("failed: simulator") == 3 and "Traceback" not in err, err
        assert "ZeroDivisionError: of the policy" in err and "faulty_for_workers.py:10: in assign" in err
        lines.append([line for line in out.splitlines() if "LAR" in line])
        files = sorted((here / f"results/runs/w{workers}").iterdir())
        # a test before this one may have asked for the commit of another working directory
        rows.append([(file.name, json.loads(file.read_text()) | {"run": "", "commit": ""}) for file in files])
    assert len(rows[0]) == 3 and rows[0] == rows[1]
    assert len(lines[0]) == 3 and lines[0] == lines[1]
    assert cli.main([*POLICY, "+request_scheduler.kind=good", "seed=0,1,2", "workers=2", "name=w1"]) == 0
    assert "simulated 0 configuration(s)" in capsys.readouterr().out, "rows of one process are those of two"


def test_a_worker_that_dies_is_one_message(here, capsys, monkeypatch):
    (here / "faulty_for_workers.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(here)
    assert cli.main([*POLICY, "workers=2", "+request_scheduler.kind=dies", "seed=0,1"]) == 2
    err = capsys.readouterr().err
    assert "ended from outside" in err and err.count("\n") == 1, err


def test_a_policy_that_cannot_be_sent_says_what_to_do():
    future: Future = Future()
    future.set_exception(pickle.PicklingError("a lambda"))
    assert "workers=1 is right" in str(_result(future, 2))


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stop_leaves_whole_rows_and_no_process(here, stop, status):
    words = ["simulate", "-m", "workload.max_batches=40", "planned_folds=0", "workers=2", "seed=range(12)"]
    child = subprocess.Popen(
        [sys.executable, "-m", "semmoe.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None and "LAR" in child.stdout.readline()
    if stop == signal.SIGINT:
        os.killpg(child.pid, stop)  # a terminal's Ctrl-C reaches every process
    else:
        child.send_signal(stop)
    _, err = child.communicate(timeout=120)  # ends when the last process that holds the pipes has ended
    assert child.returncode == status and "Traceback" not in err, err
    assert stop == signal.SIGKILL or "finished rows are kept" in err
    files = list((here / "results/runs/default").glob("*.json"))
    assert files and all(json.loads(file.read_text())["tokens"] for file in files)
    for _ in range(100):
        if not alive(child.pid):
            break
        time.sleep(0.1)
    assert not alive(child.pid)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
