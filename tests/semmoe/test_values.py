"""Every scalar key refuses what is not of its kind, by name, before anything runs."""

from __future__ import annotations

import functools
import math

import pytest

from semmoe.config import compose_all, conf_dir, sweep_points
from semmoe.errors import UserError
from semmoe.values import ON_OFF, RULES, check_values

WRONG = {
    "word": "sometimes",
    "part": 0.37,
    "nothing": None,
    "negative": -3,
    "many": [1, 2],
    "nan": math.nan,
    "flag": True,
}
SERVED = (
    "workload.num_requests",
    "workload.arrivals",
    "workload.rate_rps",
    "workload.arrival_cv",
    "workload.burst_s",
    "workload.pause_s",
    "workload.log",
    "workload.prefix_groups",
    "workload.prefix_tokens",
    "workload.max_prompt",
    "workload.max_output",
)


def composed(key: str) -> dict:
    overrides = ["workload=serve"] if key in SERVED else []
    overrides += ["trace=file", "trace.path=x"] if key == "trace.path" else []
    overrides += ["model=hf", "model.path=x"] if key == "model.path" else []
    return composed_once(tuple(overrides))


@functools.cache
def composed_once(overrides: tuple[str, ...]) -> dict:
    """Nobody writes into it: `with_value` makes another."""
    (config,) = compose_all(overrides)
    return config


def with_value(config: dict, key: str, value) -> dict:
    group, _, name = key.rpartition(".")
    return config | ({group: config[group] | {name: value}} if group else {name: value})


@pytest.mark.parametrize("key", RULES)
def test_each_key_takes_its_default_and_refuses_wrong_kinds_by_name(key):
    config = composed(key)
    group, _, name = key.rpartition(".")
    assert name in (config[group] if group else config), f"{key}: a rule for a key that no option has"
    refused = 0
    for value in WRONG.values():
        try:
            check_values(with_value(config, key, value), {})
        except UserError as error:
            assert f"{key}=" in str(error) and "must be" in str(error)
            refused += 1
    assert refused >= 3, f"{key} took almost anything"


def test_a_key_without_a_rule_keeps_the_kind_of_its_default():
    defaults = {"measure": {"new_key": 3}}
    check_values(composed("seed") | {"measure": {"new_key": 4}}, defaults)
    with pytest.raises(UserError, match=r"measure\.new_key=four must be a whole number"):
        check_values(composed("seed") | {"measure": {"new_key": "four"}}, defaults)


def test_every_key_of_the_config_that_is_null_by_default_has_a_rule():
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    missing = [key for key, value in tree.items() if value is None and key not in RULES]
    assert not missing, missing


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ep_size=abc", "ep_size=abc must be a whole number of at least 1, or null"),
        ("ep_size=", "ep_size= must be"),
        ("seed=-1", "seed=-1 must be a whole number of at least 0"),
        ("workload.batch_tokens=1e9", "must be a whole number"),
        ("dtype=fp23", "did you mean 'fp32'"),
        ("name=../elsewhere", "folder inside results_dir"),
        ("serving=3", "must be a group of keys"),
        ("train_fraction=1", "strictly between 0 and 1"),
        ("rerun=maybe", "true or false"),
        ("home_cap=nan", "home_cap=nan must be a number of at least 1"),
    ],
)
def test_messages_say_what_would_be_right(override, message):
    with pytest.raises(UserError, match=message):
        compose_all([override])


SPELLINGS = ("on", "off", "yes", "no", "true", "false", "'on'", "'off'", "'true'", "'false'", "null", "1", "0")


def flags_and_switches() -> list[str]:
    """Keys that hold true or false, or the words on and off."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    inside = {f"{g}.{k}": v for g, group in tree.items() if isinstance(group, dict) for k, v in group.items()}
    return [key for key, value in (tree | inside).items() if isinstance(value, bool) or key in ON_OFF]


@pytest.mark.parametrize("key", flags_and_switches())
def test_every_spelling_of_on_and_off_is_what_it_says_or_an_error_that_names_the_key(key):
    """On the command line and, read as YAML reads it, in a file's sweep."""
    import yaml

    group, _, name = key.rpartition(".")
    for spelling in SPELLINGS:
        for override in (f"{key}={spelling}", {key: yaml.safe_load(spelling)}):
            try:
                if isinstance(override, str):
                    (config,) = compose_all([override])
                else:
                    (point,) = sweep_points([override], [])
                    (config,) = compose_all(point)
            except UserError as error:
                assert key in str(error) and "must be" in str(error), override
                continue
            value = (config[group] if group else config)[name]
            means = spelling.strip("'") in ("on", "yes", "true")
            assert value == (("off", "on")[means] if key in ON_OFF else means), override
            assert type(value) is (str if key in ON_OFF else bool), override


def test_words_beside_on_and_off_are_unharmed():
    assert {"measure.cuda_graph", "rerun", "serving.two_batch_overlap"} <= set(flags_and_switches())
    for spelling, word in (("auto", "auto"), ("on", "on"), ("off", "off"), ("true", "on"), ("false", "off")):
        assert compose_all([f"measure.cuda_graph={spelling}"])[0]["measure"]["cuda_graph"] == word
    points = compose_all(["sweep=[{workload.max_batches: [null, 3], rerun: [true, false]}]"])
    assert [(p["workload"]["max_batches"], p["rerun"]) for p in points] == [
        (None, True),
        (None, False),
        (3, True),
        (3, False),
    ]


@pytest.mark.parametrize("value", ["null", "false", "on", "3", "{_target_:x.Y}"])
@pytest.mark.parametrize("group", ["token_scheduler", "dispatcher", "cluster", "experiment"])
def test_a_group_takes_the_name_of_an_option_and_says_so(group, value):
    with pytest.raises(UserError, match=f"{group}=.*(the name of an option is right|no such option).*none|h100x8"):
        compose_all([f"{group}={value}"])
