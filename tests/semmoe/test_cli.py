"""The command line: every kind of bad input is one message and a non-zero exit, and nothing finished is lost."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys

import numba
import numpy as np
import pytest

from semmoe import cli
from semmoe.row_files import read_rows

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
    ],
)
def test_bad_input_is_one_message_and_a_non_zero_exit(here, capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err and err.count("\n") == 1 and "Traceback" not in err
    assert not list(here.rglob("*.json")) and not out


def test_unknown_command_is_refused_with_the_nearest_one(capsys):
    code, out, err = run(capsys, "simulat")
    assert code == 2 and "did you mean 'simulate'" in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("command", cli.CONFIGURED)
def test_help_of_a_command_lists_every_group_option_and_key(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and f"semmoe {command}" in out
    for word in ("deepseek-v2-lite", "tp_shuffled", "round_robin", "train_fraction", "max_running", "timeout_s"):
        assert word in out


def test_without_a_command_the_commands_are_listed(capsys):
    code, _, err = run(capsys)
    assert code == 2 and all(f"semmoe {command}" in err for command in cli.COMMANDS)
    assert run(capsys, "--help")[0] == 0


def test_lines_of_a_sweep_say_what_differs_and_equal_rows_are_made_once(here, capsys):
    code, out, _ = run(capsys, "simulate", "-m", *SMALL, "seed=1,2")
    assert code == 0 and "seed=1" in out and "seed=2" in out
    sweep = [
        "-m",
        *SMALL,
        "name=t",
        "flow=tp_shuffled",
        "request_scheduler=round_robin,semantic",
    ]  # no axis of this flow
    code, out, _ = run(capsys, "simulate", *sweep)
    assert code == 0 and "simulated 1 configuration(s)" in out


@pytest.mark.parametrize("swept", ["cost.fidelity=bottleneck,flow", "cluster.link_gbps=1,2", "planned_folds=0,2"])
def test_settings_that_would_share_one_row_are_refused_in_a_sweep_and_taken_with_folders_of_their_own(
    here, capsys, swept
):
    code, out, err = run(capsys, "simulate", "-m", *SMALL, swept)
    name = swept.split("=")[0]
    assert code == 2 and f"name=NAME-${{{name}}}" in err and not out and not list(here.rglob("simulator-*.json"))
    code, out, _ = run(capsys, "simulate", "-m", *SMALL, swept, f"name=t-${{{name}}}")
    assert code == 0 and len(list((here / "results/runs").rglob("simulator-*.json"))) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '"x"', "{}", "\xff", '{"cluster_digest": 3}'])
def test_a_damaged_row_is_made_again(here, capsys, damage):
    assert run(capsys, "simulate", *SMALL)[0] == 0
    (path,) = (here / "results/runs/default").glob("*.json")
    whole = json.loads(path.read_text())
    path.write_text(damage, encoding="latin-1")
    code, out, _ = run(capsys, "simulate", *SMALL)
    assert code == 0 and "simulated 1 configuration" in out
    assert json.loads(path.read_text())["layer_ms"] == whole["layer_ms"]


@pytest.mark.parametrize("change", ["slo.ttft_ms=1", "cost.allow_roofline=true", "planned_folds=2", "time_limit_s=5"])
def test_a_row_made_with_other_settings_is_made_again_and_one_with_the_same_is_kept(here, capsys, change):
    served = ["simulate", "workload=serve", "workload.num_requests=4", "planned_folds=0"]
    for overrides, made in ([], 1), ([], 0), ([change], 1), ([change], 0), (["measure.warmup=9", change], 0):
        code, out, _ = run(capsys, *served, *overrides)
        assert code == 0 and f"simulated {made} configuration(s)" in out, overrides


def test_a_row_of_a_plug_in_that_was_edited_is_made_again(here, capsys):
    code = "from semmoe.placement.{0} import {1} as Mine\n"
    for option, made in (("contiguous", 1), ("contiguous", 0), ("strided", 1)):
        (here / "edited_plug_in.py").write_text(code.format(option, option.capitalize()))
        status, out, err = run(capsys, "simulate", *SMALL, "placement._target_=edited_plug_in.Mine")
        assert status == 0 and f"simulated {made} configuration(s)" in out, err


@pytest.mark.parametrize("spoil", ["results", "results/runs", "results/runs/default"])
def test_a_file_where_the_folder_of_the_run_should_be_is_named(here, capsys, spoil):
    (here / spoil).parent.mkdir(parents=True, exist_ok=True)
    (here / spoil).write_text("in the way")
    code, _, err = run(capsys, "simulate", *SMALL)
    assert (
        code == 2 and "cannot be written" in err and "results/runs/" in err and "Traceback" not in err
    )  # rows or plans


@pytest.mark.parametrize(("command", "words"), [
    ("simulate", "finished rows are kept, the same command continues"), ("slo", "rows of finished rates are kept"),
    ("advise", "placements are kept"), ("breakeven", "nothing was kept"),
])  # fmt: skip
def test_a_stopped_command_says_what_is_left_of_it(capsys, monkeypatch, command, words):
    def stopped(rest):
        raise KeyboardInterrupt("terminated")

    monkeypatch.setitem(cli.COMMANDS, command, stopped)
    assert cli.main([command]) == 143 and words in capsys.readouterr().err


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_command_with_their_status_and_leave_whole_rows_only(here, stop, status):
    command = [sys.executable, "-m", "semmoe.cli", "simulate", "-m", "workload.max_batches=40", "planned_folds=0"]
    child = subprocess.Popen([*command, "seed=range(20)"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and "LAR" in child.stdout.readline(), "a row is printed when it is finished"
    child.send_signal(stop)
    _, err = child.communicate(timeout=60)
    assert child.returncode == status and "finished rows are kept" in err and "Traceback" not in err
    files = list((here / "results/runs/default").iterdir())
    assert files and all(json.loads(file.read_text())["tokens"] for file in files)


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_within_a_compiled_kernel_ends_the_command_as_anywhere_else(monkeypatch, capsys, stop, status):
    kill = ctypes.CDLL(None).kill
    kill.argtypes, kill.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    process = os.getpid()

    @numba.njit
    def kernel(array, number):
        kill(process, number)
        return array[1:], array[::2]  # Python's C code makes views of these, and the handler runs before it is done

    def stopped_inside(rest):
        kernel(np.zeros(4), int(stop))
        return 0

    kernel(np.zeros(4), 0)
    monkeypatch.setitem(cli.COMMANDS, "simulate", stopped_inside)
    code, _, err = run(capsys, "simulate")
    assert (code, err.count("\n")) == (status, 1), err
    assert "finished rows are kept" in err


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["policies"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(argv):
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| true` does, but before the first byte: every write fails
    command = [sys.executable, "-m", "semmoe.cli", *argv]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert done.returncode == 1 and done.stderr == ""
    closed = subprocess.run(f"exec {shlex.join(command)} >&-", shell=True, capture_output=True, text=True, timeout=60)
    assert closed.returncode == 0 and closed.stderr == ""


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


def test_recording_shows_no_progress_bar_where_there_is_no_terminal(here, capfd):
    pytest.importorskip("transformers")
    assert cli.main(["trace", "record", "tiny", "--requests=2", "--max-tokens=40", "--out", "r.npz"]) == 0
    out, err = capfd.readouterr()
    assert "requests 2" in out and "%|" not in out + err
