"""The command line's configuration: sweeps, experiments, and errors that name the nearest right word."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import yaml

from semmoe.config import compose_all, conf_dir, group_options, groups, list_policies, sweep_points
from semmoe.errors import UserError


def test_default_config_resolves_to_one_point():
    (config,) = compose_all([])
    assert config["placement"]["_target_"].endswith("Contiguous") and "sweep" not in config


def test_every_option_of_every_group_composes():
    """An option of every group at a time; experiments, which choose options of other groups, with each value they sweep."""
    for choices in itertools.zip_longest(*(group_options(group) for group in groups() if group != "experiment")):
        chosen = [f"{g}={o}" for g, o in zip((g for g in groups() if g != "experiment"), choices, strict=True) if o]
        extra = ["trace.path=x"] if "trace=file" in chosen else []
        extra += ["model.path=x"] if "model=hf" in chosen else []
        assert compose_all([*chosen, *extra]), chosen
    for option in group_options("experiment"):
        experiment = yaml.safe_load((conf_dir() / "experiment" / f"{option}.yaml").read_text())
        tried: set[str] = set()
        for point in sweep_points(experiment.get("sweep") or [], []):
            if not point or set(point) - tried:
                assert compose_all([f"experiment={option}", "sweep=null", *point]), point
            tried |= set(point)


def test_multirun_is_the_product_of_its_axes():
    configs = compose_all(["placement=contiguous,strided", "seed=1,2,3"], multirun=True)
    assert [(c["placement"]["_target_"].split(".")[2], c["seed"]) for c in configs] == [
        (p, s) for p in ("contiguous", "strided") for s in (1, 2, 3)
    ]


def test_sweep_blocks_of_an_experiment_are_products_and_the_command_line_wins():
    block = "sweep=[{placement:[contiguous,strided],seed:[1,2]},{placement:[random]}]"
    assert len(compose_all([block])) == 5
    assert {c["seed"] for c in compose_all([block, "seed=7"])} == {7}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placemnt=x"], r"unknown config key 'placemnt' \(did you mean 'placement'"),
        (["seeed=1"], r"unknown config key 'seeed' \(did you mean 'seed'"),
        (["serving.max_runing=3"], r"did you mean 'serving\.max_running'"),
        (["placement=contigous"], r"placement=contigous: no such option \(did you mean 'contiguous'"),
        (["placement=contiguous,strided"], "names several values: one is right .simulate and measure: -m sweeps"),
        (["a b"], "not understood"),
        (["trace=file"], r"trace\.path has no value"),
        (["sweep=3"], "sweep must be a list"),
    ],
)
def test_errors_name_the_nearest_right_word(overrides, message):
    with pytest.raises(UserError, match=message):
        compose_all(overrides)


def test_policies_are_listed_with_what_they_do():
    text = list_policies()
    for word in ("contiguous", "semantic", "eplb", "round_robin", "token_table"):
        assert word in text
    entries = [line for line in text.splitlines() if line.startswith("  ")]
    for entry in entries:
        about = entry[2:].split(None, 1)[1]
        assert about[0].isupper() and about.endswith("."), entry
        assert not re.match(r"[a-z_]+:", about), f"{entry}: a parameter, not what the policy is"


def test_a_synthetic_trace_takes_its_shape_from_a_hugging_face_file(tmp_path):
    shape = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **shape, **heads}))
    (config,) = compose_all(["model=hf", f"model.path={tmp_path}", "trace=synthetic"])
    drawn = {key: config["trace"][key] for key in ("model", "num_experts", "top_k", "layers", "first_layer")}
    assert drawn == {"model": tmp_path.name, "num_experts": 16, "top_k": 2, "layers": 3, "first_layer": 0}
    with pytest.raises(UserError, match="no such file"):
        compose_all(["model=hf", f"model.path={tmp_path}/none", "trace=synthetic"])
