"""The evaluation of policies: rows on small data, held-out figures that move the right way, the command's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import make_trace

from semmoe.errors import UserError
from semmoe.evaluate import load, main
from semmoe.heads import Heads
from semmoe.inputs import load_cluster
from semmoe.policy_tables import bar_rows, spread
from semmoe.trials import Bench, Policy, Trial, option, paired

TRACE, MODEL = load("tiny", None)
SMALL = TRACE.select(np.arange(24))
_, CLUSTER = load_cluster(option("cluster", "h100x8"))
BENCH = Bench(SMALL, MODEL, CLUSTER, 4, folds=2, halves=2)
OURS = Trial(
    flow="tp_shuffled",
    placement=Policy("semantic", {"restarts": 2}),
    predictor=Policy("fusion"),
    scheduler=Policy("semantic"),
)


def test_known_homes_beat_predicted_ones_and_those_beat_none_on_one_placement() -> None:
    oracle, fused, blind = (
        BENCH.run(trial)["lar"].mean()
        for trial in (paired(OURS, predictor=Policy("oracle")), OURS, paired(OURS, predictor=Policy("none")))
    )
    assert oracle > fused > blind + 0.1
    assert blind == pytest.approx(0.25, abs=0.02)


def test_trials_share_a_placement_where_they_say_so() -> None:
    first, _ = BENCH.fitted(OURS, 0)
    second, _ = BENCH.fitted(paired(OURS, predictor=Policy("token_table")), 0)
    assert first.placement is second.placement and first.predictor is not second.predictor


def test_heads_run_where_they_arrived_and_the_rest_where_the_scheduler_says() -> None:
    trial = Trial(
        flow="dp", placement=Policy("semantic", {"restarts": 2}), scheduler=Policy("windowed", {"slack": 0.0})
    )
    known, stays = BENCH.run(trial), BENCH.run(paired(trial, head_tokens=10**6))
    assert known["after_head_lar"].mean() > known["lar"].mean() > stays["lar"].mean()
    assert stays["lar"].mean() == pytest.approx(0.25, abs=0.03)  # all tokens are head: nobody is re-homed in time
    assert np.isnan(stays["after_head_lar"]).all()


def test_outputs_that_return_elsewhere_save_bytes_and_leave_lar_alone() -> None:
    plain, moved = BENCH.run(OURS), BENCH.run(paired(OURS, scheduler=Policy("rehome")))
    assert np.array_equal(plain["lar"], moved["lar"]) and np.array_equal(plain["fan_out"], moved["fan_out"])
    assert (moved["bytes_per_token"] < plain["bytes_per_token"]).all()


def test_the_kv_of_moved_heads_is_charged() -> None:
    trial = Trial(flow="dp", placement=Policy("contiguous"), scheduler=Policy("windowed", {"slack": 0.0}))
    stays, half, long = (BENCH.run(paired(trial, head_tokens=n))["kv_bytes_per_token"].mean() for n in (0, 8, 10**6))
    assert stays == long == 0.0 < half < 8 * 24 * MODEL.kv_bytes_per_token / SMALL.num_tokens
    ordered = Trial(flow="dp", placement=Policy("contiguous"), scheduler=Policy("round_robin"))
    assert BENCH.run(ordered)["kv_bytes_per_token"].mean() == 0.0  # everybody stays where he came


def test_heads_by_hand() -> None:
    trace = make_trace(requests=3, tokens=3, layers=1)
    heads = Heads(trace, np.array([1, 1, 1]), 2, 2)
    assert heads.home_T.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 1]
    assert heads.kv_moves_M3.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert Heads(trace, np.array([1, 1, 1]), 2, 3).kv_moves_M3.tolist() == []  # all end in their heads


def test_the_command_refuses_what_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["--trace", "tiny", "--ep", "3"]) == 2
    assert "ep_size=3" in capsys.readouterr().err
    for words, told in (
        ("--folds 1", "--folds 1 must be at least 2"),
        ("--halves 0", "--halves 0"),
        ("--seed -1", "--seed -1"),
        ("--time-limit -1", "--time-limit -1"),
        ("--placements semantc", "did you mean 'semantic'"),
        ("--trace nofile.npz", "needs --model"),
        ("--model tiny", "--model tiny needs a trace of it (--trace FILE)"),
        ("--trace gptoss --model olmoe-1b-7b", "routes of their own models"),
    ):
        assert main(["--trace", "tiny", *words.split()]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ep", "x"])
    with pytest.raises(UserError, match="needs --model"):
        load(str(tmp_path / "x.npz"), None)


def test_spread_is_the_deviation_over_folds() -> None:
    assert spread(np.array([0.5, 0.6]), "lar") == "0.550 ± 0.071"
    assert spread(np.array([1.0, 3.0]), "placement_s") == "2.00 ± 1.41"


def test_bars_stand_beside_what_was_measured() -> None:
    class Measured:
        """A bench of two folds in which fusion doubles the table and an extra slot a rank adds a tenth."""

        ep_size = 8

        def run(self, trial: Trial) -> dict[str, np.ndarray]:
            lar = 0.2 if trial.predictor.name == "token_table" else 0.4 + 0.1 * trial.extra_slots
            return {c: np.array([lar, lar]) for c in ("lar", "imbalance_total", "fan_out", "placement_s")}

    lines = bar_rows(Measured()).splitlines()  # type: ignore[arg-type]
    assert any("one extra slot" in line and "0.500" in line and ".42" in line for line in lines)
    assert any("fusion minus token table" in line and ".055 | 0.200" in line for line in lines)
