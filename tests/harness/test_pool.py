"""The pool of rank processes: results by rank, and one clear end of all ranks when one is in trouble."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

from harness.pool import RankError, RankPool  # noqa: E402
from harness.worker import RankContext, is_broken_connection  # noqa: E402
from semmoe.errors import UserError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def sum_of_ranks(context: RankContext, add: float) -> float:
    value = torch.tensor([float(context.rank) + add])
    torch.distributed.all_reduce(value)
    return value.item()


def remember(context: RankContext, value: int | None) -> int:
    if value is not None:
        context.state["value"] = value + context.rank
    return context.state["value"]


def wait_together(context: RankContext, bad_rank: int, how: str) -> None:
    """`bad_rank` leaves in some way while all others wait for it in a collective."""
    if context.rank == bad_rank:
        if how == "raise":
            raise ValueError("a fault of its own")
        if how == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    torch.distributed.barrier()


def slow_with_progress(context: RankContext, steps: int, each_s: float) -> int:
    for step in range(steps):
        time.sleep(each_s)
        context.progress(step + 1, steps)
    return steps


def plugin_answer(context: RankContext) -> int:
    import my_plugin_of_pool_test  # type: ignore[import-not-found]

    return my_plugin_of_pool_test.ANSWER


def leave_a_file(context: RankContext) -> str:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        return file.name


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def gone(pids: list[int]) -> bool:
    return not any(map(lives, pids))


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also one that ends between the two calls
        return False


def test_ranks_compute_together_and_results_come_by_rank(pool):
    assert pool.run(sum_of_ranks, 1.0) == [3.0, 3.0]
    assert pool.run(remember, 10) == [10, 11]
    assert pool.run(remember, None) == [10, 11], "state must survive from task to task"


def test_progress_is_reported_and_keeps_a_slow_task_alive(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout_s", 0.8)
    seen: list[tuple[int, int]] = []
    assert pool.run(slow_with_progress, 5, 0.3, progress=lambda done, total: seen.append((done, total))) == [5] * 2
    assert seen == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", ["rank 1 of 2", "SIGKILL", "wait_together"]),
        ("raise", ["rank 1 of 2", "ValueError: a fault of its own", "wait_together"]),
        (
            "hang",
            ["no answer from rank 1 of 2 within 3 s during wait_together: rank 1 is in wait_together (test_pool.py:"],
        ),
        ("stop", ["no answer from rank 1 of 2 within 3 s", "rank 1 has ended or is stopped"]),
    ],
)
def test_trouble_in_one_rank_ends_all_and_names_it(how, words):
    pool = RankPool(2, timeout_s=3.0)
    pids, scratch = pool.pids, Path(pool._scratch)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(wait_together, 1, how)
    assert time.monotonic() - start < 30
    for word in words:
        assert word in str(caught.value)
    assert gone(pids), "every rank must have ended"
    assert not scratch.exists(), "nothing shared may stay behind"
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(sum_of_ranks, 0.0)


def test_the_rank_where_the_trouble_began_is_named_not_those_that_lost_their_peer():
    pool = object.__new__(RankPool)
    pool.ranks = 4
    assert is_broken_connection(
        RuntimeError("NCCL error in: x.cpp, remote process exited or there was a network error")
    )
    broken = RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    lost = {0: (broken, "", is_broken_connection(broken)), 1: (broken, "", is_broken_connection(broken))}
    killed = pool._explain("measure", lost | {3: (None, "was killed by SIGSEGV", False)})
    assert (killed.rank, "rank 3 of 4 was killed by SIGSEGV" in str(killed)) == (3, True)
    wrong = pool._explain("measure", lost | {2: (UserError("checkpoint.bin: row 3 is wrong"), "", False)})
    assert str(wrong) == "rank 2 of 4: checkpoint.bin: row 3 is wrong"


def test_ranks_start_in_the_users_folder_although_the_usual_port_is_taken(tmp_path, monkeypatch):
    (tmp_path / "my_plugin_of_pool_test.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        pool = RankPool(2)
    assert pool.run(sum_of_ranks, 0.0) == [1.0, 1.0]
    assert pool.run(plugin_answer) == [42, 42]
    file, _ = pool.run(leave_a_file)
    assert Path(file).exists()
    os.kill(pool.pids[1], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL before sum_of_ranks"):
        pool.run(sum_of_ranks, 0.0)
    assert not Path(file).exists(), "temporary files go with the pool"


def test_death_of_the_parent_ends_ranks_that_wait_in_a_collective(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from harness.pool import RankPool
            from tests.harness.test_pool import wait_together
            if __name__ == "__main__":
                pool = RankPool(2)
                print(*pool.pids, pool._scratch, flush=True)
                pool.run(wait_together, 1, "hang")
            """
        )
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None
    *pids, scratch = parent.stdout.readline().split()
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and not (gone([int(p) for p in pids]) and not Path(scratch).exists()):
        time.sleep(0.1)
    left = [p for p in pids if not gone([int(p)])]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left
    assert not Path(scratch).exists()


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads signal masks from /proc")
def test_an_interrupt_never_reaches_a_rank_not_even_while_it_starts():
    with RankPool(2) as pool:
        for pid in pool.pids:
            status = Path(f"/proc/{pid}/status").read_text()
            (blocked,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
            assert blocked >> (signal.SIGINT - 1) & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
