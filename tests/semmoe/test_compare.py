"""Compare: joins by configuration, keeps localities apart, and says gain, loss or no gain as the intervals allow."""

from __future__ import annotations

import csv
import json
import math

import pytest
from compare_rows import AXES, SEMANTIC, SERVE, folder, line, measured, row
from scipy import stats

from semmoe import cli
from semmoe.compare import compare
from semmoe.errors import UserError
from semmoe.row_files import write_row

TIMES = {"ttft_ms": 1234.5, "tpot_ms": 12.3, "e2e_ms": 98765.4}


def test_both_sides_join_with_error_and_spread(tmp_path):
    c = compare(folder(tmp_path, row(layer_ms=9.0), *measured("aaa", [10.0, 11.0, 9.0])))
    joined = line(c, "aaa")
    assert joined.sides == "both" and joined.layer_error_pct == pytest.approx(-10)
    assert joined.layer_spread_pct == pytest.approx(100 * (1 + 1 + 2) / 3 / 10) and joined.replay_equal == "yes"
    assert c.summary["layer"]["median_error_pct"] == pytest.approx(10)
    assert c.summary["lar_gap_points"]["max"] == pytest.approx(1.0)


def test_the_spread_is_the_mean_difference_of_two_repeats_and_not_their_range(tmp_path):
    """A range grows with the number of repeats, and with it the error that twice the spread allows."""
    even = [8.0, 8.5, 9.0, 9.5, 10.0, 10.5, 11.0, 11.5, 12.0]  # n values a step apart: (n + 1) / 3 steps
    joined = line(compare(folder(tmp_path, row(), *measured("aaa", even))), "aaa")
    assert joined.layer_spread_pct == pytest.approx(100 * 0.5 * 10 / 3 / 10)


def test_attention_of_whole_models_is_told(tmp_path):
    whole = {"scope": "full_model", "attention_ms": 2.0}
    c = compare(folder(tmp_path, row(**whole | {"attention_ms": 1.5}), *measured("aaa", [9.0], **whole)))
    assert "Attention time: median absolute error 25.0 %" in " ".join(c.render().split())


def test_a_missing_side_is_shown_and_named(tmp_path):
    c = compare(
        folder(tmp_path, row(), *measured("aaa", [9.0]), row(config="sim"), *measured("real", [5.0], **SEMANTIC))
    )
    assert line(c, "sim").sides == "simulated only" and line(c, "real").sides == "measured only"
    assert "3 configurations: 1 simulated and measured, 1 simulated only, 1 measured only." in c.render()


@pytest.mark.parametrize(
    "rows", [[row(layer_ms=4.0), row(config="b", layer_ms=3.0, **SEMANTIC)], measured("aaa", [5.0])]
)
def test_one_backend_alone_is_shown(tmp_path, rows):
    c = compare(folder(tmp_path, *rows))
    assert set(c.table.sides) <= {"simulated only", "measured only"} and c.table.layer_error_pct.isna().all()
    assert (
        "no gain" in c.table.verdict.iloc[-1]
        or "baseline" in c.table.verdict.iloc[-1]
        or "faster" in c.table.verdict.iloc[-1]
    )


def test_nothing_joinable_names_the_axis_that_differs(tmp_path):
    far = json.dumps(
        AXES | {"seed": 7, "cluster": "h100x8", "workload": {"kind": "batches", "composition": "by_request"}}
    )
    near = json.dumps(AXES | {"workload": {"kind": "batches", "composition": "by_request"}})
    folder(tmp_path, row(config="s"), *measured("far", [5.0], axes=far), *measured("near", [5.0], axes=near))
    with pytest.raises(
        UserError, match=r"1 simulated and 2 measured.*s and near.*workload.composition: shuffled simulated, by_req"
    ) as e:
        compare([tmp_path])
    assert "seed" not in str(e.value) and "h100x8" not in str(e.value)


def test_the_same_id_on_another_cluster_does_not_join(tmp_path):
    with pytest.raises(UserError, match="cluster: h100x8 simulated, local measured"):
        compare(folder(tmp_path, row(cluster="h100x8"), *measured("aaa", [5.0])))


def test_a_folder_named_twice_counts_once(tmp_path):
    folder(tmp_path, row(), *measured("aaa", [10.0, 11.0]))
    assert compare([tmp_path, tmp_path]).table.repeats.tolist() == [2]


def test_an_axis_without_a_column_tells_configurations_apart_and_a_needless_one_does_not_show(tmp_path):
    slack = [json.dumps(AXES | {"request_scheduler": {"slack": s}, "serving": {"max": 1}}) for s in (1.0, 2.0)]
    c = compare(folder(tmp_path, row(config="a", axes=slack[0]), row(config="b", axes=slack[1])))
    assert c.axes == ("flow", "request_scheduler.slack")
    assert c.table.configuration.tolist() == ["dp / request_scheduler.slack=1", "dp / request_scheduler.slack=2"]
    assert "slack" in c.render()
    told = compare(folder(tmp_path / "two", row(axes=slack[0]), row(config="b", axes=slack[1], **SEMANTIC)))
    assert told.axes == ("flow", "placement", "request_scheduler")


@pytest.mark.parametrize(
    "change",
    [{"node_bytes": 5001.0}, {"lar_per_layer": "[0.25, 0.2500001]"}, {"metadata_bytes": 88.0}, {"lar_measured": 0.2500001},
     {"fan_out_measured": 2.2}, {"tokens": 999}, {"steps": 3}, {"sag_bytes": 8.0}],
)  # fmt: skip
def test_one_lost_row_is_seen_as_difference(tmp_path, change):
    c = compare(folder(tmp_path, row(), *measured("aaa", [10.0], **change)))
    (name,) = change
    assert line(c, "aaa").replay_equal == f"no ({name.removesuffix('_measured')})" and "1 DIFFER: #1" in c.render()


def test_one_bad_repeat_among_good_ones_is_seen(tmp_path):
    good = measured("aaa", [10.0, 10.0, 10.0])
    c = compare(folder(tmp_path, row(), *good[:2], good[2] | {"dispatch_bytes": 2499.0}))
    assert line(c, "aaa").replay_equal == "no (dispatch_bytes)"


def test_a_served_run_that_formed_other_batches_is_no_failure(tmp_path):
    c = compare(folder(tmp_path, row(**SERVE), *measured("aaa", [10.0], **SERVE, node_bytes=9.0, steps_file="log")))
    assert line(c, "aaa").replay_equal == "other steps" and "replay=RUN" in c.render()


def test_a_replayed_row_stands_for_the_simulation_and_is_held_to_its_own_repeat(tmp_path):
    logs = [m | {"steps_file": f"steps-aaa-r{m['repeat']}.npz"} for m in measured("aaa", [10.0, 12.0], **SERVE)]
    logs[1] |= {"steps": 7, "lar_measured": 0.9}  # other batches, not logged by the replayed row
    folder(tmp_path, row(layer_ms=1.0, steps=9, ttft_ms=5.0, **SERVE), *logs)
    replayed = row(layer_ms=8.0, steps_file="steps-aaa-r0.npz", **SERVE)
    write_row(tmp_path / "replay", replayed)
    joined = line(compare([tmp_path, tmp_path / "replay"]), "aaa")
    assert joined.layer_ms_predicted == 8.0 and joined.ttft_ms_predicted == 5.0 and joined.replay_equal == "yes"
    assert joined.lar_measured == 0.25 and joined.layer_ms_measured == 11.0
    write_row(tmp_path / "replay", replayed | {"metadata_bytes": 1.0})
    assert line(compare([tmp_path, tmp_path / "replay"]), "aaa").replay_equal == "no (metadata_bytes)"


def test_each_replay_is_held_to_the_repeat_that_it_re_executed(tmp_path):
    other = {"tokens": 900, "node_bytes": 4500.0}
    for i, figures in enumerate(({}, other)):
        log = {"steps_file": f"steps-aaa-r{i}.npz", "repeat": i, **SERVE}
        write_row(tmp_path, row("harness", **log, **figures))
        write_row(tmp_path, row(**log, **figures))
    assert line(compare([tmp_path]), "aaa").replay_equal == "yes"


def test_order_counts_agreeing_and_undecided_pairs(tmp_path):
    c = compare(folder(tmp_path, row(config="a", layer_ms=1.0), row(config="b", layer_ms=2.0, placement="eplb"),
                       row(config="c", layer_ms=3.0, placement="random"), *measured("a", [10.0]),
                       *measured("b", [10.1], placement="eplb"), *measured("c", [5.0], placement="random")))  # fmt: skip
    assert c.summary["order"] == {"same": 0, "opposite": 2, "undecided": 1, "kendall_tau": pytest.approx(-1 / 3)}
    assert math.isnan(c.summary["order_across_flows"]["kendall_tau"])


def test_kendall_tau_is_scipys(tmp_path):
    predicted, real = [1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 30.0, 20.0, 50.0, 40.0]
    rows = []
    for i, (p, m) in enumerate(zip(predicted, real, strict=True)):
        rows += [row(config=str(i), layer_ms=p, placement=f"p{i}"), *measured(str(i), [m], placement=f"p{i}")]
    tau = compare(folder(tmp_path, *rows)).summary["order"]["kendall_tau"]
    assert tau == pytest.approx(stats.kendalltau(predicted, real).statistic)


def test_errors_are_held_to_the_spread_of_their_own_repeats(tmp_path):
    noisy, steady = measured("noisy", [8.0, 12.0]), measured("steady", [10.0, 10.0], placement="eplb")
    c = compare(
        folder(
            tmp_path,
            row(config="noisy", layer_ms=15.0),
            row(config="steady", layer_ms=15.0, placement="eplb"),
            *noisy,
            *steady,
        )
    )
    assert (c.summary["layer"]["within"], c.summary["layer"]["count"]) == (1, 2)


def test_planned_is_never_held_to_replayed_where_measured_exists(tmp_path):
    c = compare(folder(tmp_path, row(), *measured("aaa", [9.0], lar_measured=0.3), row(config="sim", lar_planned=0.9)))
    assert c.summary["lar_gap_points"] == {
        "against": "measured",
        "median": pytest.approx(4.0),
        "max": pytest.approx(4.0),
    }


def test_the_text_keeps_to_its_width_and_loses_no_name(tmp_path):
    long = [f"my_package.policies.long_module_name_{i}.APlacementPolicyWithALongName" for i in range(3)]
    rows = [row(config=str(i), placement=name, request_scheduler=name, **TIMES) for i, name in enumerate(long)]
    for one in [
        r
        for i, name in enumerate(long)
        for r in measured(str(i), [9.0], placement=name, request_scheduler=name, **TIMES)
    ]:
        rows.append(one)
    text = compare(folder(tmp_path, *rows)).render(width=140)
    tables, sentences = text.split("Traffic replayed")
    assert max(map(len, text.splitlines())) <= 140 and "End-to-end ms" in tables
    assert all(name in sentences for name in long)
    assert "kB/token" in tables and "Layer ms" in tables


def test_a_name_cannot_steer_the_terminal(tmp_path):
    text = compare(folder(tmp_path, row(), row(config="b", placement="\x1b[2Jevil"))).render()
    assert "\x1b" not in text and "?[2Jevil" in text


@pytest.mark.parametrize("name", ["<script>", 'a,"b"', "two\nlines", "=1+2", "ü ∞"])
def test_hostile_names_survive_the_csv(tmp_path, name):
    folder(tmp_path, row(), row(config="b", placement=name))
    compare([tmp_path]).to_csv(tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        assert {line["placement"] for line in csv.DictReader(file)} == {"contiguous", name}


def test_a_full_disk_leaves_the_old_csv(tmp_path, monkeypatch):
    c = compare(folder(tmp_path, row()))
    (tmp_path / "t.csv").write_text("old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left"):
        c.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == "old"


def test_a_corrupted_row_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(UserError, match="holds no result rows"):
        compare([tmp_path])
    for content in (b"{half", b"[]", b"\xff\xfe", b""):
        (tmp_path / "simulator-local-aaa-r0.json").write_bytes(content)
        with pytest.raises(UserError, match=r"simulator-local-aaa-r0\.json: not a result row"):
            compare([tmp_path])
    with pytest.raises(UserError, match="column axes is not JSON"):
        compare(folder(tmp_path, row(axes="{half")))


def test_command_writes_report_and_csv(tmp_path, capsys):
    folder(tmp_path, row(), *measured("aaa", [10.0]))
    assert cli.main(["compare", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 0
    assert "median absolute error" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file() and "lar_measured" in (tmp_path / "t.csv").read_text()


def test_transports_are_lines_of_their_own_and_never_averaged(tmp_path):
    both = [measured(c, [v], transport=t, **x) for c, x in (("aaa", {}), ("sem", SEMANTIC))
            for t, v in (("collective", 10.0 if c == "aaa" else 5.0), ("shared", 2.0 if c == "aaa" else 4.0))]  # fmt: skip
    c = compare(folder(tmp_path, row(), row(config="sem", **SEMANTIC), *(one for rows in both for one in rows)))
    told = {(line.config_id, line.transport): line for line in c.table.itertuples()}
    assert {k: v.layer_ms_measured for k, v in told.items()} == {
        ("aaa", "collective"): 10.0, ("aaa", "shared"): 2.0, ("sem", "collective"): 5.0, ("sem", "shared"): 4.0}  # fmt: skip
    assert "transport" in c.axes and set(c.table.replay_equal) == {"yes"}
    assert told["sem", "collective"].verdict.startswith("50 % faster")
    assert told["sem", "shared"].verdict.startswith("100 % slower")


def test_wide_axes_get_a_table_of_their_own_uncut_and_served_figures_only_served_rows(tmp_path):
    long = {"placement": "somebody.package.policies.Placement", "request_scheduler": "somebody.package.policies.Router"}
    served = {"workload": "serve", "rate_rps": 8.0, "ttft_ms": 5.0, "tpot_ms": 2.0, "e2e_ms": 9.0}
    text = compare(folder(tmp_path, row(), row(config="bbb", **long), row(config="ccc", **served))).render()
    tables = {block.split("\n")[0]: block for block in text.split("\n\n")}
    assert all(name in tables["configurations"] for name in long.values()), "a name is cut"
    assert max(map(len, text.splitlines())) <= 140 and "contiguous" not in tables["locality"]
    assert len(tables["served requests"].splitlines()) == 3 + 1 + 1, "title, three lines of heading, the served row"


def test_cold_and_warm_eager_and_graph_are_lines_of_their_own_and_never_held_against_each_other(tmp_path):
    """One configuration measured four ways is no repeat of itself; a cold policy has no warm baseline."""
    ways = [{"flush_mb": 0.0}, {"flush_mb": 256.0}, {"cuda_graph": "on"}, {"cuda_graph": "off: CPU tensors"}]
    for number, way in enumerate(ways):
        for each in measured("aaa", [10.0 + number], **way):
            write_row(tmp_path / str(number), each)
    for each in measured("sem", [5.0], flush_mb=256.0, **SEMANTIC):
        write_row(tmp_path / "5", each)
    found = compare([tmp_path / name for name in ("0", "1", "2", "3", "5")]).table
    alike = found[found.config_id == "aaa"].set_index(["launch", "caches"])
    assert set(alike.index) == {("eager", "warm"), ("eager", "cold, 256 MB flushed"), ("graph", "warm")}
    assert alike.repeats.to_dict()["eager", "warm"] == 2 and alike.layer_ms_measured["graph", "warm"] == 12.0
    (policy,) = found[found.config_id == "sem"].to_dict("records")
    assert "54.5 %" in policy["verdict"] or "55 %" in policy["verdict"], policy["verdict"]  # of 11 ms, not of 11.5
