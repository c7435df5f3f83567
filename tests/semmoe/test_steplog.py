"""The step log: what was written comes back, and what is no log is refused."""

from __future__ import annotations

import numpy as np
import pytest
from weird_arrays import WEIRD

from semmoe.errors import UserError
from semmoe.serving import StepPlan, TokenRows
from semmoe.serving.steplog import StepLog, step_log_path


def log() -> StepLog:
    def plan(index: int, *entries: tuple[int, int, int, int, int]) -> StepPlan:
        return StepPlan(index, *np.array(entries, dtype=np.int64).T)

    plans = [plan(0, (0, 0, 0, 0, 3), (1, 1, 0, 0, 2)), plan(1, (1, 1, 1, 2, 1))]
    return StepLog("abc", plans, np.array([1.5, 2.5]), np.array([0.0, 7.0]), TokenRows(np.array([100, 50])))


def test_plans_durations_and_token_rows_survive_the_file(tmp_path):
    path = log().save(step_log_path(tmp_path, "abc", 2))
    assert path.name == "steps-abc-r2.npz"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    back = StepLog.load(path)
    assert (back.config_id, len(back.plans)) == ("abc", 2)
    for ours, theirs in zip(log().plans, back.plans, strict=True):
        assert ours.index == theirs.index
        for name in ("rank_N", "request_N", "phase_N", "start_N", "count_N"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_array_equal(back.duration_ms_S, [1.5, 2.5])
    np.testing.assert_array_equal(back.now_ms_S, [0.0, 7.0])
    (rows, queues), (last, _) = back.token_rows()
    assert rows.tolist() == [100, 101, 102, 50, 51] and queues.tolist() == [0, 0, 0, 1, 1]
    assert last.tolist() == [52]


def test_a_log_without_steps_survives_too(tmp_path):
    empty = StepLog("abc", [], np.zeros(0), np.zeros(0), TokenRows(np.array([0])))
    assert StepLog.load(empty.save(tmp_path / "x.npz")).plans == []


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such step log"):
        StepLog.load(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match=r"text.npz: not a readable .npz step log"):
        StepLog.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", schema_version=np.int64(1))
    with pytest.raises(UserError, match=r"other.npz: lacks config_id"):
        StepLog.load(tmp_path / "other.npz")
    np.savez(tmp_path / "new.npz", schema_version=np.int64(9))
    with pytest.raises(UserError, match="schema version 9"):
        StepLog.load(tmp_path / "new.npz")


def test_a_full_disk_leaves_no_half_log(tmp_path, monkeypatch):
    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(UserError, match="No space left"):
        log().save(tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


def test_every_array_of_a_wrong_kind_shape_or_range_is_refused_by_name(tmp_path):
    path = log().save(tmp_path / "good.npz")
    arrays = dict(np.load(path))
    bad = tmp_path / "bad.npz"
    for name, array in arrays.items():
        np.savez(bad, **{key: value for key, value in arrays.items() if key != name})
        with pytest.raises(UserError, match=rf"bad\.npz: lacks {name}"):
            StepLog.load(bad)
        for kind, weird in WEIRD.items():
            np.savez(bad, **arrays | {name: weird})
            with pytest.raises(UserError, match=r"bad\.npz: "):
                StepLog.load(bad)
                pytest.fail(f"{name}: {kind} was taken")
        if array.ndim == 1 and array.dtype.kind == "i":
            np.savez(bad, **arrays | {name: array - 1000})
            with pytest.raises(UserError, match=rf"bad\.npz: {name}"):
                StepLog.load(bad)
