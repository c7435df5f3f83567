"""The command line: every kind of bad input is one message and a non-zero exit, and nothing finished is lost."""

from __future__ import annotations

import json

import pytest

from semmoe import cli
from semmoe.results import read_rows

SMALL = ["workload.max_batches=1", "planned_folds=0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_simulate_writes_one_row_and_a_second_time_keeps_it(here, capsys):
    code, out, _ = run(capsys, "simulate", *SMALL, "name=one")
    assert code == 0 and "simulated 1 configuration" in out and "LAR" in out
    (row,) = read_rows([here / "results/runs/one"]).to_dict("records")
    assert row["backend"] == "simulator" and row["tokens"] == 512 and row["layer_ms"] > 0
    code, out, _ = run(capsys, "simulate", *SMALL, "name=one")
    assert code == 0 and "simulated 0 configuration(s)" in out and "1 rows exist already" in out
    code, out, _ = run(capsys, "simulate", *SMALL, "name=one", "rerun=true")
    assert "simulated 1 configuration" in out


def test_a_stopped_sweep_continues_where_it_stopped(here, capsys, monkeypatch):
    import simulator.app

    original, calls = simulator.app.simulate, []

    def stops_at_the_second(run):
        calls.append(run.config_id)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(run)

    sweep = ["simulate", "-m", *SMALL, "name=s", "placement=contiguous,strided,random"]
    monkeypatch.setattr(simulator.app, "simulate", stops_at_the_second)
    code, _, err = run(capsys, *sweep)
    assert code == 130 and "finished rows are kept" in err
    files = list((here / "results/runs/s").iterdir())
    assert len(files) == 1 and json.loads(files[0].read_text())["placement"] == "contiguous"
    monkeypatch.setattr(simulator.app, "simulate", original)
    code, out, _ = run(capsys, *sweep)
    assert code == 0 and "simulated 2 configuration(s)" in out and "1 rows exist already" in out


def test_a_policy_in_a_file_of_the_working_directory_works_by_its_target(here, capsys):
    (here / "my_policy_for_test.py").write_text(
        "import numpy as np\n"
        "from semmoe.placement import Placement\n"
        "class Mine:\n"
        "    def place(self, problem):\n"
        "        rank_E = np.arange(problem.model.num_experts) % problem.ep_size\n"
        "        rank_LE = np.tile(rank_E, (problem.profile.num_layers, 1))\n"
        "        return Placement.from_ranks(rank_LE, problem.ep_size, problem.layer_ids)\n"
    )
    code, _, err = run(capsys, "simulate", *SMALL, "name=mine", "placement._target_=my_policy_for_test.Mine")
    assert code == 0, err
    run(capsys, "simulate", *SMALL, "name=mine", "placement=strided")
    rows = read_rows([here / "results/runs/mine"]).set_index("placement")
    assert rows.loc["my_policy_for_test.Mine", "lar_replayed"] == rows.loc["strided", "lar_replayed"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "placemnt=contiguous"], "did you mean 'placement'"),
        (["simulate", "--frobnicate"], "unknown option --frobnicate"),
        (["simulate", "ep_size=3"], "use a divisor of 32"),
        (["simulate", "trace=file", "trace.path=absent.npz"], "no such trace file"),
        (["simulate", "model=olmoe-1b-7b"], "recorded on tiny"),
        (["measure", "ep_size=5"], "only 4 ranks"),
        (["compare", "nowhere"], "no such run"),
        (["place", "placement._target_=absent.Policy"], "absent"),
        (["trace", "info", "absent.npz"], "no such trace file"),
        (["trace", "record", "tiny", "absent.txt", "--out", "x.npz"], "absent.txt"),
        (["trace", "synthetic", "requests", "--out", "x.npz"], "key=value is right"),
        (["policies", "extra"], "no arguments"),
        (["simulate", "replay=nowhere"], "no such run"),
        (["simulate", "replay=nowhere"], "no such run"),
    ],
)
def test_bad_input_is_one_message_and_a_non_zero_exit(here, capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err
    assert not list(here.rglob("*.json")) and not out


def test_unknown_command_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["simulat"])
    assert stop.value.code == 2 and "simulat" in capsys.readouterr().err


def test_place_writes_a_placement_that_can_be_read(here, capsys):
    code, out, _ = run(
        capsys, "place", "placement=semantic", "planned_folds=2", "flow=tp_shuffled", "token_scheduler=semantic"
    )
    assert code == 0 and "lar_planned" in out
    (path,) = (here / "results/runs/default").glob("placement-*.json")
    content = json.loads(path.read_text())
    assert sorted(content["physical_to_logical_map"][0]) == list(range(32)) and content["ep_size"] == 4


def test_trace_info_and_synthetic(here, capsys):
    code, out, _ = run(capsys, "trace", "info", "asset:traces/tiny_docs.npz")
    assert code == 0 and "tiny, 32 experts, top-4" in out
    code, out, _ = run(capsys, "trace", "synthetic", "requests=12", "--out", "synth.npz")
    assert code == 0 and "requests 12" in out and (here / "synth.npz").is_file()
