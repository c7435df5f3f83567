"""The cluster file that a config names: who may lack it, who says so, and what a calibration starts from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from semmoe import cli
from semmoe.builder import RunBuilder
from semmoe.config import compose_one
from semmoe.inputs import load_cluster

FILE = "results/runs/calibration/local.yaml"  # that cluster=local names by itself
CONTENT = (
    "{name: local, nodes: 1, ranks_per_node: 2, topology: shared_memory, memory_gib: 4, memory_gbps: 9, "
    "bf16_tflops: 0.1, link_gbps: 3, alpha_us: 1, cores: 2}"
)
SMALL = ["workload.max_batches=1", "planned_folds=0"]
OF = {"check": ["placement._target_=semmoe.placement.contiguous.Contiguous"]} | {"slo": [], "advise": []}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calibrated(monkeypatch):
    """What `semmoe calibrate` hands to the harness: [(run, file)]."""
    made = []
    monkeypatch.setattr(cli, "_backend", lambda *_: SimpleNamespace(calibrate=lambda *given: made.append(given)))
    return made


def refused(capsys, *argv: str) -> str:
    assert cli.main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("command", [command for command in cli.CONFIGURED if command != "calibrate"])
def test_every_command_refuses_a_file_that_was_named_and_is_missing(here, capsys, command):
    words = OF.get(command, SMALL)
    said = refused(capsys, command, *words, "cluster=local", "cluster.file=mine/loca.yaml")
    assert "cluster.file=mine/loca.yaml: no such file; `semmoe calibrate cluster.file=mine/loca.yaml` makes it" in said
    (here / "mine").mkdir()
    (here / "mine/local.yaml").write_text(CONTENT)
    said = refused(capsys, command, *words, "cluster=local", "cluster.file=mine/loca.yaml")
    assert "did you mean 'mine/local.yaml'?" in said
    assert "is a folder" in refused(capsys, command, *words, "cluster=local", "cluster.file=mine")
    assert not list(here.rglob("*.json"))


def test_the_default_file_may_be_missing_and_a_simulation_says_what_its_times_are(here, capsys):
    assert cli.main(["simulate", *SMALL]) == 0
    said = capsys.readouterr().err
    assert f"warning: {FILE} does not exist: times come from" in said and said.count("\n") == 1
    assert cli.main(["simulate", *SMALL, "seed=1", "cluster.file=null"]) == 0
    assert cli.main(["simulate", *SMALL]) == 0  # the row is kept: nothing is priced
    (here / FILE).parent.mkdir()
    (here / FILE).write_text(CONTENT)
    assert cli.main(["simulate", *SMALL]) == 0
    assert not capsys.readouterr().err
    assert RunBuilder().build(compose_one(SMALL)).cluster.link_gbps == 3


@pytest.mark.parametrize("before", [None, "[1, 2", CONTENT])
def test_a_calibration_starts_from_the_config_whatever_lies_in_its_file(here, calibrated, before):
    if before:
        (here / "mine.yaml").write_text(before)
    assert cli.main(["calibrate", "cluster.file=mine.yaml", "cluster.ranks_per_node=3", "ep_size=2"]) == 0
    ((run, file),) = calibrated
    assert (file, run.cluster.ranks, run.ep_size) == ("mine.yaml", 3, 2)


def test_a_calibration_needs_a_file(here, calibrated, capsys):
    for words in ["cluster.file=null"], ["cluster=h100x8"]:
        assert "has no `file` to write; semmoe calibrate needs cluster=local" in refused(capsys, "calibrate", *words)
    assert not calibrated


def test_a_value_that_the_file_would_silently_replace_is_refused(here, capsys):
    (here / "mine.yaml").write_text(CONTENT)
    for command in "simulate", "measure":
        said = refused(capsys, command, *SMALL, "cluster.file=mine.yaml", "cluster.ranks_per_node=8")
        assert "cluster.ranks_per_node=8 has no effect: mine.yaml holds 2; calibrate again with it" in said
    config = compose_one([*SMALL, "cluster.file=mine.yaml", "cluster.ranks_per_node=2"])  # as the file says
    assert load_cluster(config["cluster"])[1].ranks == 2
