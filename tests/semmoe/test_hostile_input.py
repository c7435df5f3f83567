"""Absurd values, gaps in the config, policies that break their protocol, places that cannot be written: one message each,
said before any long work, and nothing left behind."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
from compare_rows import measured, row

from semmoe import cli, session
from semmoe.errors import UserError
from semmoe.files import check_writable, write_atomically
from semmoe.row_files import write_row

SMALL = ["workload.max_batches=1", "planned_folds=0"]
SHUFFLED = [*SMALL, "flow=tp_shuffled", "token_scheduler=semantic"]
POLICIES = """
    import sys

    class Nothing:
        def place(self, problem): return None
        def scores(self, token_ids_T, layer, history, placement): return None
        def assign(self, request, score_G, head_counts, ranks): return None
        def homes(self, score_TG, capacity): return None
        def slots(self, experts_Tk, homes_T, placement, layer): return None

    class Learns(Nothing):
        def fit(self, profile): ...

    class Few(Learns):
        def place(self): ...
        def homes(self, score_TG): ...
        def scores(self, token_ids_T): ...
        def slots(self, experts_Tk): ...
        def assign(self, request): ...

    class Leaves(Nothing):
        def place(self, problem): sys.exit(7)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "hostile_policies.py").write_text(textwrap.dedent(POLICIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hostile_policies", raising=False)  # of another test's folder
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        session, "warn_uncalibrated", lambda groups: None
    )  # which says that, and no fault, in a line too
    return tmp_path


def refused(capsys, *argv: str, code: int = 2) -> str:
    """What the command says; it is one line, and the exit status tells."""
    assert cli.main(list(argv)) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said, said
    return said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["seed=99999999999999999999"], "seed=1e+20 must be a whole number of at least 0"),
        (["home_cap=" + "9" * 500], "home_cap=inf must be a number of at least 1"),
        (
            ["trace.requests=999999999", "trace=profile", "model=qwen3-30b-a3b", "cluster=h100x8"],
            "GiB are free; use fewer requests",
        ),
        (["trace.prompt_len=999999999999", "trace=synthetic"], "GiB are free; use fewer requests"),
        (["~seed"], "~seed: cannot be left out; seed=VALUE sets it"),
        (["~serving"], "~serving: cannot be left out"),
        (["~serving.kv_tokens"], "~serving.kv_tokens: cannot be left out"),
        (["~workload.batch_tokens"], "~workload.batch_tokens: cannot be left out"),
        (["~flow.name"], "~flow.name: cannot be left out"),
        (["~trace.path"], "trace.path is missing"),
        (["~cluster.nodes"], "cluster local: lacks nodes"),
        (["~placement"], "placement is left out; placement=NAME is right (contiguous,"),
        (["placement._target_="], "module.Class is right"),
        (["placement._target_=null"], "placement._target_ names no class"),
        (["request_scheduler._target_=null"], "request_scheduler._target_ names no class"),
        (["transport.name=nope"], "must be one of collective, shared, symmetric, virtual"),
        (["measure.feed=nope"], "must be one of hidden, random, checkpoint"),
        (["measure.timeout_s=1e300"], "at most 604800 (a week)"),
        (["measure.flush_mb=-1"], "from 0 (warm caches) to 4096"),
    ],
)
def test_absurd_values_and_gaps_are_refused_before_anything_runs(here, capsys, argv, message):
    assert message in refused(capsys, "simulate", *SMALL, *argv)
    assert not list(here.rglob("*.json"))


def test_a_number_too_long_for_64_bits_is_the_number_that_it_says(here, capsys):
    assert cli.main(["simulate", *SMALL, "home_cap=99999999999999999999", "time_limit_s=99999999999999999999"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["placement._target_=hostile_policies.Nothing"], "returned NoneType; place() must return a Placement"),
        (["placement._target_=hostile_policies.Few"], "place() is called as place(self, problem): too many"),
        ([*SHUFFLED, "predictor._target_=hostile_policies.Learns"], "scores() returned NoneType; (score_TG of shape"),
        (
            [*SHUFFLED, "predictor._target_=hostile_policies.Nothing"],
            "has no method fit(), which every predictor needs",
        ),
        (
            [*SHUFFLED, "predictor._target_=hostile_policies.Few"],
            "scores(self, token_ids_T, layer, history, placement)",
        ),
        ([*SHUFFLED, "token_scheduler._target_=hostile_policies.Nothing"], "homes() returned NoneType; a Plan of the"),
        ([*SHUFFLED, "token_scheduler._target_=hostile_policies.Few"], "is called as homes(self, score_TG, capacity)"),
        (
            ["placement.slots=40", "replica_router._target_=hostile_policies.Nothing"],
            "slots() returned NoneType of shape",
        ),
        (
            ["placement.slots=40", "replica_router._target_=hostile_policies.Few"],
            "is called as slots(self, experts_Tk,",
        ),
        (["request_scheduler._target_=hostile_policies.Few"], "assign(request) is called as assign(self, request,"),
        (["request_scheduler._target_=hostile_policies.Learns"], "is called as fit(self, profile, placement)"),
    ],
)
def test_a_policy_that_breaks_its_protocol_is_named_with_what_is_right(here, capsys, argv, message):
    assert message in refused(capsys, "simulate", *SMALL, *argv)


def test_a_policy_that_leaves_does_not_end_the_command_without_a_word(here, capsys):
    said = refused(capsys, "simulate", *SMALL, "placement._target_=hostile_policies.Leaves", code=1)
    assert "hostile_policies.py:" in said and "in place: ended the command (SystemExit: 7)" in said


@pytest.mark.parametrize("place", ["", ".", "/proc/nowhere/x", "file/x"])
@pytest.mark.parametrize(
    "command",
    [
        ["trace", "record", "tiny", "--out", "{}"],
        ["trace", "synthetic", "--out", "{}"],
        ["evaluate", "policies", "--out", "{}"],
        ["compare", "rows", "--html", "{}"],
        ["advise", "html={}"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(here, capsys, command, place):
    write_row(here / "rows", row())
    (here / "file").write_text("")
    said = refused(capsys, *[word.format(place) for word in command])
    assert "cannot be written" in said and "name a file in a folder of yours" in said
    assert sorted(path.name for path in here.iterdir()) == ["file", "hostile_policies.py", "rows"]


def test_asking_leaves_neither_file_nor_folder(tmp_path):
    check_writable(tmp_path / "a" / "b" / "c.json")
    assert not list(tmp_path.iterdir())
    write_atomically(tmp_path / "kept.json", "old")
    check_writable(tmp_path / "kept.json")
    assert (tmp_path / "kept.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError, match="is a folder"):
        write_atomically("", "text")


@pytest.mark.parametrize("column", ["layer_ms", "step_ms", "node_bytes", "tokens"])
def test_a_row_that_was_edited_to_less_than_nothing_is_named(here, capsys, column):
    path = write_row(here / "rows", measured("aaa", [9.0])[0])
    path.write_text(json.dumps(json.loads(path.read_text()) | {column: -5}))
    assert f"{path.relative_to(here)}: column {column} holds -5" in refused(capsys, "compare", "rows")
