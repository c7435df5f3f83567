"""Plans on disk: found by the next session, made anew when damaged or asked, never kept for policies from elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.plan_store import PlanStore, is_ours
from semmoe.recipe import Recipe

SMALL = ("placement=eplb", "planned_folds=2", "ep_size=4")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was planned, in order."""
    made: list[str] = []
    for name in ("place", "planned"):
        whole = getattr(Recipe, name)

        def counted(*args, _whole=whole, _name=name, **more):
            made.append(_name)
            return _whole(*args, **more)

        monkeypatch.setattr(Recipe, name, counted)
    return made


def build(store: PlanStore | None, *overrides: str):
    (config,) = compose_all([*SMALL, *overrides])
    return RunBuilder(store).build(config)


def test_the_next_session_finds_the_plan_and_the_planned_figures(tmp_path: Path, calls: list[str]) -> None:
    first = build(PlanStore(tmp_path))
    assert "place" in calls and "planned" in calls
    calls.clear()
    again = build(PlanStore(tmp_path))
    assert not calls and again.planned == first.planned
    a, b = first.fitted.placement, again.fitted.placement
    np.testing.assert_array_equal(a.physical_to_logical_LP, b.physical_to_logical_LP)
    assert (a.ep_size, a.layer_ids, a.num_experts) == (b.ep_size, b.layer_ids, b.num_experts)
    build(PlanStore(tmp_path), "ep_size=2")
    build(PlanStore(tmp_path, renew=True))
    assert calls.count("planned") == 2


def test_nothing_is_kept_without_a_folder_or_for_other_peoples_policies(tmp_path: Path, calls: list[str]) -> None:
    build(None, "planned_folds=0")
    build(None, "planned_folds=0")
    assert calls.count("place") == 2
    assert is_ours({"_target_": None}, {}, {"_target_": "semmoe.placement.eplb.Eplb"})
    assert not is_ours({"_target_": "semmoe.placement.eplb.Eplb"}, {"_target_": "my_policy.Mine"})


def test_a_damaged_file_is_planned_again(tmp_path: Path, calls: list[str]) -> None:
    first = build(PlanStore(tmp_path))
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:20])
    calls.clear()
    again = build(PlanStore(tmp_path))
    assert "place" in calls and "planned" in calls and again.planned == first.planned


def test_attention_tp_flows_share_a_placement_and_a_time_limit_makes_another(calls: list[str]) -> None:
    builder = RunBuilder()
    for flow in ("tp_scattered", "tp_shuffled", "tp_replicated"):
        words = [*SMALL, "planned_folds=0", f"flow={flow}"]
        builder.build(compose_all([*words, *(["dispatcher=none"] if flow == "tp_replicated" else [])])[0])
    assert calls == ["place"]
    builder.build(compose_all([*SMALL, "planned_folds=0", "flow=tp_scattered", "time_limit_s=5"])[0])
    assert calls == ["place", "place"]


def test_schedulers_share_the_placements_of_folds_and_the_figures_stay_theirs(calls: list[str]) -> None:
    builder, planned = RunBuilder(), []
    for scheduler in ("round_robin", "semantic"):
        (config,) = compose_all([*SMALL, "flow=dp", f"request_scheduler={scheduler}"])
        planned.append(builder.build(config).planned)
    assert calls.count("place") == 3, "the whole training part and two folds, once each"
    (config,) = compose_all([*SMALL, "flow=dp", "request_scheduler=semantic"])
    assert planned[0] != planned[1] == RunBuilder().build(config).planned
