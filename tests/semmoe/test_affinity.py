"""Drawn routes: reproducible, as the profile's numbers say, marked in rows; shipped profiles state what they were fitted to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from semmoe.builder import RunBuilder
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.predict.evaluate import accuracy
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.sources.affinity import PROFILES, AffinityProfile, shipped


@pytest.fixture(scope="module")
def thin() -> AffinityProfile:
    profile = AffinityProfile.load("deepseek-v2-lite")
    return replace(profile, layer_ids=profile.layer_ids[:2])


def recall(profile: AffinityProfile) -> float:
    train, test = profile.draw(64, 96, 0, ["sharegpt"]).split(0.5, 0)
    table = TokenTable()
    table.fit(Profile.fit(train))
    return float(accuracy(table, test).recall_L.mean())


def test_same_seed_same_routes_and_another_seed_other_requests_of_the_same_model(thin: AffinityProfile) -> None:
    a, b, c = (thin.draw(8, 30, 5, ["sharegpt", "mmlu"], 0.4, seed) for seed in (0, 0, 1))
    assert a.digest == b.digest != c.digest
    assert sorted(set(a.domain_R)) == ["mmlu", "sharegpt"] and a.num_layers == 2
    assert len(set(np.unique(a.token_id_T)) & set(np.unique(c.token_id_T))) > 2


# figures that Algorithm 1 does not reach on any routes of the generator (sources/fit_affinity.py); all others within .025
MISSED = {"deepseek-v2-lite": {}, "qwen3-30b-a3b": {"lar_tp": 0.065, "lar_dp": 0.065, "lar_dp_other_domain": 0.05}}


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b"])
def test_shipped_profiles_are_small_name_their_sources_and_say_how_near_their_targets_they_came(name: str) -> None:
    assert name in shipped() and (PROFILES / f"{name}.json").stat().st_size < 1_000_000
    said = AffinityProfile.load(name).provenance
    assert "2503.04398" in said["target_sources"] and "fit_affinity" in said["made_by"]
    for figure, target in said["targets"].items():
        assert said["reached"][figure] == pytest.approx(target, abs=MISSED[name].get(figure, 0.025)), figure


def test_the_numbers_do_what_they_say(thin: AffinityProfile) -> None:
    assert recall(replace(thin, habit=0.0, meaning=0.0)) < recall(replace(thin, habit=1.0)) < recall(thin)
    even, skewed = (
        replace(thin, skew=skew).draw(48, 96, 0, list(thin.domains)).experts_TLk[:, 0].ravel() for skew in (0.0, 1.0)
    )
    spread = [np.bincount(e, minlength=64).std() / np.bincount(e, minlength=64).mean() for e in (even, skewed)]
    assert spread[0] < spread[1]


def test_rows_say_that_the_routes_were_drawn() -> None:
    (config,) = compose_all(
        ["model=deepseek-v2-lite", "cluster=h100x8", "trace=profile", "trace.requests=4", "trace.prompt_len=4",
         "trace.output_len=2", "planned_folds=0"]
    )  # fmt: skip
    assert "drawn from profile deepseek-v2-lite" in RunBuilder().build(config).identity("simulator", "-", "-")["trace"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"apart": 1.5}, "0..1"), ({"skew": -1.0}, "negative"), ({"domains": []}, "domains"), ({"vocab_size": 9}, "too small"),
     ({"meaning": "much"}, "finite number")],
)  # fmt: skip
def test_absurd_numbers_are_refused(thin: AffinityProfile, changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(thin, **changes)


def test_missing_and_damaged_profiles_teach(tmp_path) -> None:
    with pytest.raises(UserError, match="shipped are deepseek-v2-lite"):
        AffinityProfile.load("mixtral-8x7b")
    for content in ("{", json.dumps({"model": "x", "colour": 3})):
        (tmp_path / "p.json").write_text(content)
        with pytest.raises(UserError, match="not an affinity profile"):
            AffinityProfile.load(tmp_path / "p.json")
    for wrong in ("trace.domains=[klingon]", "trace.requests=0", "trace.length_spread=-1"):
        (config,) = compose_all(["model=deepseek-v2-lite", "cluster=h100x8", "trace=profile", wrong])
        with pytest.raises(UserError, match=r"trace"):
            RunBuilder().build(config)
