"""Whatever is wrong with a `_target_`, the message says which part of it and where."""

from __future__ import annotations

import itertools
import sys

import pytest

from semmoe import cli
from semmoe.config import POLICY_GROUPS, compose_all, group_options
from semmoe.errors import UserError
from semmoe.plugins import METHODS, instantiate

MODULE = """
class Right:
    def __init__(self, slack: float = 1.0, rounds: int = 3, greedy: bool = False, how: str | None = None): pass
    def place(self, problem): return problem.nonsense
class NoMethod: pass
class Raises:
    def __init__(self): raise RuntimeError("boom")
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plug_for_test.py").write_text(MODULE)
    (tmp_path / "plug_bad_syntax.py").write_text("class Mine(:\n")
    (tmp_path / "plug_bad_import.py").write_text("import not_there_at_all\n")
    (tmp_path / "plug_raises.py").write_text("x = 1\nraise ValueError('as it is read')\n")
    yield
    for name in ("plug_for_test", "plug_bad_syntax", "plug_bad_import", "plug_raises"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"_target_": "Mine"}, "module.Class is right"),
        ({"_target_": "plug for test.Right"}, "module.Class is right"),
        ({"_target_": "plug_for_tst.Right"}, "no module 'plug_for_tst' in the working directory"),
        ({"_target_": "plug_for_test.Rigt"}, "has no 'Rigt' .did you mean 'Right'"),
        ({"_target_": "plug_for_test.number"}, "is a int"),
        ({"_target_": "plug_bad_syntax.Mine"}, r"plug_bad_syntax\.py:1: .*SyntaxError"),
        ({"_target_": "plug_bad_import.Mine"}, "needs 'not_there_at_all', which is not installed"),
        ({"_target_": "plug_raises.Mine"}, r"plug_raises\.py:2: .*ValueError: as it is read"),
        ({"_target_": "plug_for_test.NoMethod"}, r"has no method place\(\)"),
        ({"_target_": "plug_for_test.Raises"}, "boom"),
        ({"_target_": "plug_for_test.Right", "unknown": 1}, "unknown"),
        ({"_target_": "plug_for_test.Right", "slack": "much"}, "placement.slack=much must be a finite number"),
        ({"_target_": "plug_for_test.Right", "rounds": 2.5}, "placement.rounds=2.5 must be a whole number"),
        ({"_target_": "plug_for_test.Right", "greedy": 1}, "placement.greedy=1 must be true or false"),
        ({"_target_": "plug_for_test.Right", "how": 3}, "placement.how=3 must be a word or null"),
    ],
)
def test_each_fault_of_a_target_is_one_message_that_names_it(module, group, message):
    with pytest.raises(UserError, match=message):
        instantiate(group, "placement")


def test_right_values_pass(module):
    made = instantiate({"_target_": "plug_for_test.Right", "slack": 2, "rounds": 1, "how": None}, "placement")
    assert type(made).__name__ == "Right"


def test_an_exception_inside_a_plug_in_names_its_line_and_is_no_traceback(module, capsys):
    code = cli.main(["place", "placement._target_=plug_for_test.Right", "planned_folds=0"])
    err = capsys.readouterr().err
    assert code == 1 and "plug_for_test.py:4: in place: AttributeError" in err and "Traceback" not in err


def test_every_built_in_policy_has_the_method_that_its_group_asks_for():
    assert set(METHODS) == set(POLICY_GROUPS)
    options = [group_options(group) for group in POLICY_GROUPS]
    for choices in itertools.zip_longest(*options):  # one of every group at a time, as long as there are any
        chosen = {group: option for group, option in zip(POLICY_GROUPS, choices, strict=True) if option}
        (config,) = compose_all([f"{group}={option}" for group, option in chosen.items()])
        for group in chosen:
            instantiate({key: value for key, value in config[group].items() if key != "slots"}, group)
