"""Compare: joins by configuration, keeps localities apart, and says gain, loss or no gain as the intervals allow."""

from __future__ import annotations

import pytest
from compare_rows import measured, row

from semmoe import cli
from semmoe.compare import compare
from semmoe.errors import UserError
from semmoe.results import write_row

SEMANTIC = {"placement": "semantic", "request_scheduler": "semantic_request"}


def folder(tmp_path, *rows):
    for one in rows:
        write_row(tmp_path, one)
    return [tmp_path]


def line(comparison, config):
    return comparison.table.set_index("config_id").loc[config]


def test_both_sides_join_with_error_and_spread(tmp_path):
    c = compare(folder(tmp_path, row(layer_ms=9.0), *measured("aaa", [10.0, 11.0, 9.0])))
    joined = line(c, "aaa")
    assert joined.sides == "both" and joined.layer_error_pct == pytest.approx(-10)
    assert joined.layer_spread_pct == pytest.approx(20) and joined.replay_equal == "yes"
    assert c.summary["layer"]["median_error_pct"] == pytest.approx(10)
    assert c.summary["lar_gap_points"]["max"] == pytest.approx(1.0)


def test_a_missing_side_is_shown_and_named(tmp_path):
    c = compare(folder(tmp_path, row(config="sim"), *measured("real", [5.0], **SEMANTIC)))
    assert line(c, "sim").sides == "simulated only" and line(c, "real").sides == "measured only"
    assert "-" in c.render()


@pytest.mark.parametrize(
    "change", [{"node_bytes": 5001.0}, {"lar_per_layer": "[0.25, 0.2500001]"}, {"metadata_bytes": 88.0}]
)
def test_one_lost_row_is_seen_as_difference(tmp_path, change):
    c = compare(folder(tmp_path, row(), *measured("aaa", [10.0], **change)))
    assert line(c, "aaa").replay_equal.startswith("no") and "DIFFER" in c.render()


def test_a_served_run_that_formed_other_batches_is_no_failure(tmp_path):
    c = compare(folder(tmp_path, row(steps=5), *measured("aaa", [10.0])))
    assert line(c, "aaa").replay_equal == "other steps" and "use replay=" in c.render()


def test_a_replayed_row_stands_for_the_simulation(tmp_path):
    folder(tmp_path, row(layer_ms=1.0, steps=9), *measured("aaa", [10.0]))
    write_row(tmp_path / "replay", row(layer_ms=8.0, steps_file="steps-aaa-r0.npz"))
    joined = line(compare([tmp_path, tmp_path / "replay"]), "aaa")
    assert joined.layer_ms_predicted == 8.0 and joined.replay_equal == "yes"


def test_gain_loss_and_no_gain_are_said_in_words(tmp_path):
    fast, same = measured("fast", [5.0, 5.2], **SEMANTIC), measured("same", [9.9, 10.4], placement="eplb")
    slow = measured("slow", [20.0, 21.0], placement="random")
    c = compare(folder(tmp_path, *measured("base", [10.0, 10.2]), *fast, *same, *slow))
    assert line(c, "base").verdict == "baseline"
    assert line(c, "fast").verdict.startswith("50 % faster than dp contiguous")
    assert line(c, "same").verdict.startswith("no gain here")
    assert "slower than dp contiguous" in line(c, "slow").verdict


def test_attention_tp_is_held_to_the_replicated_flow_where_that_is_better(tmp_path):
    tp = {"flow": "tp_shuffled", "request_scheduler": "-", "token_scheduler": "no_shuffle"}
    replicated = measured("rep", [8.0], flow="tp_replicated", dispatcher="none", request_scheduler="-")
    ours = measured("ours", [9.0], **(tp | {"placement": "semantic", "token_scheduler": "semantic"}))
    c = compare(folder(tmp_path, *replicated, *measured("shuffled", [10.0], **tp), *ours))
    assert "slower than tp_replicated contiguous" in line(c, "ours").verdict


def test_order_counts_agreeing_and_undecided_pairs(tmp_path):
    c = compare(folder(tmp_path, row(config="a", layer_ms=1.0), row(config="b", layer_ms=2.0, placement="eplb"),
                       row(config="c", layer_ms=3.0, placement="random"), *measured("a", [10.0]),
                       *measured("b", [10.1], placement="eplb"), *measured("c", [5.0], placement="random")))  # fmt: skip
    assert c.summary["order"] == {"same": 0, "opposite": 2, "undecided": 1}


def test_a_corrupted_row_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(UserError, match="holds no result rows"):
        compare([tmp_path])
    (tmp_path / "simulator-local-aaa-r0.json").write_text("{half")
    with pytest.raises(UserError, match=r"simulator-local-aaa-r0\.json: not a result row"):
        compare([tmp_path])


def test_command_writes_report_and_csv(tmp_path, capsys):
    folder(tmp_path, row(), *measured("aaa", [10.0]))
    assert cli.main(["compare", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    assert "median absolute error" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file() and "lar_measured" in (tmp_path / "t.csv").read_text()


def test_serving_figures_come_from_the_free_run_and_latency_from_the_replay(tmp_path):
    folder(tmp_path, row(layer_ms=1.0, steps=9, ttft_ms=5.0, workload="serve"),
           *measured("aaa", [10.0], ttft_ms=6.0, workload="serve"))  # fmt: skip
    write_row(tmp_path / "replay", row(layer_ms=8.0, steps_file="steps-aaa-r0.npz", workload="serve"))
    joined = line(compare([tmp_path, tmp_path / "replay"]), "aaa")
    assert (joined.ttft_ms_predicted, joined.layer_ms_predicted) == (5.0, 8.0)
