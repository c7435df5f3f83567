"""Cluster presets: loadable, with provenance, and equal to what the script makes of the public measurements."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from simulator_kit import CONF, presets, spec

from simulator.cost.collectives import CollectiveCost
from simulator.presets.build import build, curves
from simulator.presets.machines import PRESETS
from simulator.presets.render import render

NAMES = ("h100x8", "h200x8", "a100x8", "h800x8", "h20x8", "b200x8", "mi300x8", "l40sx8", "ascend910bx8", "local")
NAMES += ("h100x16", "h100x32", "gb200x72")


def test_the_promised_presets_exist_and_say_where_their_numbers_come_from():
    assert set(NAMES) <= set(presets())
    for name, made in presets().items():
        assert made.name == name and made.provenance
        if name != "local":
            assert {"hardware", "link", "experts"} <= set(made.provenance)
            assert made.ranks == int(name.rpartition("x")[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dispatcher", ["allgather_rs", "a2a_dedup", "low_latency"])
def test_every_preset_can_price_every_dispatcher(name, dispatcher):
    made = presets()[name]
    CollectiveCost(made, spec(dispatcher=dispatcher), made.ranks, 1)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name)
def test_committed_presets_are_what_the_script_makes_of_the_data(preset, shared_data):
    made = yaml.safe_load(render(build(preset, shared_data / "perfdata")))
    committed = yaml.safe_load((CONF / "cluster" / f"{preset.name}.yaml").read_text())
    fitted = ("memory_efficiency", "max_mfu", "mfu_half_rows", "expert_floor_us")
    for raw in (made, committed):
        raw["provenance"].pop("experts")
    for key in fitted:  # the optimiser may end a little elsewhere with another version of scipy
        assert made.pop(key, 0.0) == pytest.approx(committed.pop(key, 0.0), rel=0.02)
    laws = [raw.get("deepep", {}).pop("normal", {}) for raw in (made, committed)]
    ours, theirs = (pd.json_normalize(law).to_dict("records") for law in laws)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == (other[key] if isinstance(value, str) else pytest.approx(other[key], rel=0.02)), key
    assert made == committed


def test_an_unmeasured_table_stops_the_script(shared_data):
    table = pd.read_csv(shared_data / "perfdata" / "nccl_intranode.csv")
    with pytest.raises(ValueError, match=r"no NCCL rows for h100_sxm, NCCL 1\.0"):
        curves(table, "h100_sxm", "1.0")
