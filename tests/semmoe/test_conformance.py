"""`semmoe check`: every built-in conforms, and every kind of broken plug-in is caught by the check that is meant for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from semmoe import cli
from semmoe.builder import RunBuilder
from semmoe.config import compose_all, group_options
from semmoe.conformance import CHECKS, Subject, run_checks
from semmoe.placement.base import Placement
from semmoe.plugins import instantiate
from semmoe.schedule.base import Plan


@pytest.fixture(scope="module")
def run():
    (config,) = compose_all(["planned_folds=0"])
    return RunBuilder().build(config)


def failed(run, group, make) -> set[str]:
    train = run.train.select(np.arange(30))
    return {o.name for o in run_checks(group, Subject(make, run.recipe, train)) if o.passed is False}


SLOW_OR_SPECIAL = {"exact", "oracle"}  # exact refuses 32 experts; an oracle needs true routes
BUILT_IN = [(group, option) for group in CHECKS for option in group_options(group) if option not in SLOW_OR_SPECIAL]


@pytest.mark.parametrize(("group", "option"), BUILT_IN)
def test_built_in_policies_conform(run, group, option):
    (config,) = compose_all([f"{group}={option}"])
    if not config[group].get("_target_"):
        pytest.skip(f"{group}={option} stands for no policy")
    policy = {key: value for key, value in config[group].items() if key != "slots"}
    assert failed(run, group, lambda: instantiate(policy, group)) == set()


class Wandering:
    """Another placement every time."""

    counter = itertools.count()

    def place(self, problem):
        rng = np.random.default_rng(next(self.counter))
        order = np.stack([rng.permutation(problem.slots) for _ in problem.layer_ids]) % problem.model.num_experts
        return Placement(order, problem.ep_size, problem.layer_ids, problem.model.num_experts)


class TooFewLayers:
    def place(self, problem):
        row = (np.arange(problem.slots) % problem.model.num_experts)[None]
        return Placement(row, problem.ep_size, problem.layer_ids[:1], problem.model.num_experts)


class Meddling:
    def place(self, problem):
        problem.profile.load_LE[:] = 0
        row = np.arange(problem.slots) % problem.model.num_experts
        table = np.tile(row, (len(problem.layer_ids), 1))
        return Placement(table, problem.ep_size, problem.layer_ids, problem.model.num_experts)


class FloatScores:
    def fit(self, profile):
        self.known = int(profile.trace.token_id_T.max())

    def scores(self, token_ids_T, layer, history, placement):
        return np.zeros((len(token_ids_T), placement.ep_size)), np.zeros(len(token_ids_T))


class OnlySeen(FloatScores):
    def fit(self, profile):
        self.table = {int(t): 1 for t in profile.trace.token_id_T}

    def scores(self, token_ids_T, layer, history, placement):
        rows = [[self.table[int(t)]] * placement.ep_size for t in token_ids_T]
        return np.array(rows, np.int32).reshape(-1, placement.ep_size), np.zeros(len(token_ids_T))


class Greedy:
    """Ignores the capacity."""

    def homes(self, score_TG, capacity):
        return Plan.from_owner(score_TG.argmax(axis=1), score_TG.shape[1])


class Claiming:
    """Deals tokens out in turn and says that they keep their order."""

    keeps_order = True

    def homes(self, score_TG, capacity):
        return Plan.from_owner(np.arange(len(score_TG)) % score_TG.shape[1], score_TG.shape[1])


class Hoarding:
    def assign(self, request, score_G, head_counts, ranks):
        return 0


class Lost:
    def assign(self, request, score_G, head_counts, ranks):
        return ranks.ranks


class FirstSlot:
    def slots(self, experts_Tk, homes_T, placement, layer):
        return np.zeros_like(experts_Tk)


BROKEN = [
    ("placement", Wandering, "same seed, same placement"), ("placement", TooFewLayers, "places every expert of every layer"),
    ("placement", Meddling, "leaves the profile alone"), ("predictor", FloatScores, "scores have shape and kind"),
    ("predictor", OnlySeen, "scores unseen tokens"), ("token_scheduler", Greedy, "plans are permutations within capacity"),
    ("token_scheduler", Claiming, "keeps the order where it says so"),
    ("request_scheduler", Hoarding, "leaves no rank idle"), ("request_scheduler", Lost, "assigns ranks that exist"),
    ("replica_router", FirstSlot, "slots hold the expert"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "policy", "name"), BROKEN)
def test_a_broken_plug_in_is_caught_by_the_check_for_its_fault(run, group, policy, name):
    assert name in failed(run, group, policy)


def test_command_prints_suite_and_table_and_its_exit_status_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plug_in_for_check.py").write_text(
        "from semmoe.schedule.base import Plan\n"
        "import numpy as np\n"
        "class Deal:\n"
        "    def homes(self, score_TG, capacity):\n"
        "        return Plan.from_owner(np.arange(len(score_TG)) % score_TG.shape[1], score_TG.shape[1])\n"
        "class Pile:\n"
        "    def homes(self, score_TG, capacity):\n"
        "        return Plan.from_owner(np.zeros(len(score_TG), int), score_TG.shape[1])\n"
    )
    assert cli.main(["check", "token_scheduler._target_=plug_in_for_check.Deal"]) == 0
    out = capsys.readouterr().out
    assert "* plug_in_for_check.Deal" in out and "semantic" in out and out.count("  ok") == 3
    assert cli.main(["check", "token_scheduler._target_=plug_in_for_check.Pile"]) == 1
    assert "FAILED   plans are permutations within capacity: AssertionError: a rank got" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "takes one policy"),
        (["seed=1"], "takes one policy"),
        (["placement=semantic", "predictor=fusion"], "takes one policy"),
        (["placement._target_=absent.Policy"], "absent"),
    ],
)
def test_what_cannot_be_checked_is_one_message(argv, message, capsys):
    assert cli.main(["check", *argv]) == 2
    assert message in capsys.readouterr().err
