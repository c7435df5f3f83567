"""A rank of torchrun whose environment is wrong, whose port is taken or whose peers never come says so in one message."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from harness import torchrun
from harness.__main__ import is_experiment
from harness.torchrun import TorchrunPool, follow, is_follower
from harness.worker import RankContext
from semmoe.errors import UserError


def set_environment(monkeypatch, **values: object) -> None:
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1} | values
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("value", ["x", "", "-1", "1.5"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_number_that_is_none_is_named(monkeypatch, name, value):
    set_environment(monkeypatch, **{name: value})
    with pytest.raises(UserError, match=rf"{name}='{value}' in the environment is not a whole number"):
        is_follower()
        TorchrunPool(2)


def test_a_world_of_another_size_and_a_rank_beyond_it_are_refused(monkeypatch):
    set_environment(monkeypatch, WORLD_SIZE=3)
    with pytest.raises(UserError, match="torchrun gave 3 ranks, the configuration has ep_size=2"):
        TorchrunPool(2)
    set_environment(monkeypatch, RANK=2)
    with pytest.raises(UserError, match="RANK=2 in the environment must be below WORLD_SIZE=2"):
        follow(1.0)


def test_a_taken_port_and_peers_that_never_come_end_in_one_message(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        set_environment(monkeypatch, MASTER_PORT=port)
        with pytest.raises(
            UserError, match=r"rank 0 of 2 could not meet the others at 127\.0\.0\.1:\d+ within 1 s: .*listen"
        ):
            TorchrunPool(2, timeout_s=1.0)
    set_environment(monkeypatch, MASTER_PORT=port)
    with pytest.raises(UserError, match=r"within 1 s: .*[Tt]imed out.*; start all ranks by one torchrun command"):
        TorchrunPool(2, timeout_s=1.0)
    assert not dist.is_initialized() and not torchrun.TorchrunPool.opened


def test_overrides_alone_are_an_experiment_also_those_that_take_a_group_away():
    assert is_experiment(["experiment=dry_run", "-m", "~token_scheduler", "+token_scheduler={_target_: mine.Mine}"])
    assert not is_experiment([]) and not is_experiment(["measure", "name=x"]) and not is_experiment(["polices"])


def fails(context: RankContext, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("a.safetensors: tensor x is missing"), r"^rank 2 of 3: a\.safetensors: tensor x is missing$"),
        (KeyError("x"), r"^rank 2 of 3 failed during fails: KeyError: 'x'\n(.*\n)*Traceback"),
        (
            RuntimeError("gloo: Timed out waiting 5000ms\nmore"),
            r"^rank 2 of 3 has no answer from rank 1 during fails: rank 1 has ended or is stopped "
            r"\(RuntimeError: gloo: Timed out waiting 5000ms; a longer measure\.timeout_s helps",
        ),
    ],
)
def test_a_task_that_fails_names_its_rank_or_the_one_that_it_lost(error, said):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(UserError, match=said):
        torchrun._attended(RankContext(2, 3), {1: (gone.pid, 7), 2: (1, 7)}, fails, (error,))
