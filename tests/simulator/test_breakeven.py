"""Break-even maps: the traffic is what its LAR says, baselines gain nothing, dense dispatch never pays."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semmoe.cli import main
from semmoe.config import compose_all
from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.inputs import load_cluster
from semmoe.plugins import instantiate
from semmoe.traffic import count_traffic
from simulator.breakeven import break_even, even_traffic


@pytest.fixture(scope="module")
def olmoe():
    (config,) = compose_all(["model=olmoe-1b-7b", "cluster=l40sx8"])
    return instantiate(config["model"], "model"), load_cluster(config["cluster"])[1]


def spec_of(model, flow="dp", dispatcher="a2a_dedup"):
    return DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=model.hidden, top_k=model.top_k)


@settings(max_examples=10, deadline=None)
@given(lar=st.floats(0.05, 1.0), tokens=st.sampled_from([1, 16, 4096]))
def test_even_traffic_has_its_lar_and_loads_all_ranks_alike(olmoe, lar, tokens):
    model, _ = olmoe
    traffic = even_traffic(model, spec_of(model), 8, tokens, lar)
    total = traffic.assignment_pairs_LGG.sum()
    assert traffic.local_assignments_L().sum() / total == pytest.approx(lar) and total == pytest.approx(
        8 * tokens * model.top_k
    )
    assert np.ptp(traffic.rank_pairs_LGG.sum(axis=1)) == pytest.approx(0, abs=1e-9)
    assert (traffic.rank_pairs_LGG <= traffic.assignment_pairs_LGG + 1e-9).all()


def test_even_traffic_is_what_random_routes_count_on_average(olmoe):
    model, _ = olmoe
    rng, tokens, ranks = np.random.default_rng(0), 4000, 8
    slots = np.argsort(rng.random((tokens, model.num_experts)), axis=1)[:, None, : model.top_k]
    real = count_traffic(slots, np.arange(tokens) % ranks, model.num_experts, ranks, spec_of(model))
    ideal = even_traffic(model, spec_of(model), ranks, tokens // ranks, 1 / ranks)
    # choices without repetition spread a little wider than independent ones
    assert real.remote_rank_pairs_L()[0] == pytest.approx(ideal.remote_rank_pairs_L()[0], rel=0.05)
    assert real.payload_bytes() == pytest.approx(ideal.payload_bytes(), rel=0.05)


def test_chance_saves_nothing_against_its_own_dispatcher_and_locality_saves_more_and_more(olmoe):
    model, cluster = olmoe
    found = break_even(model, cluster, spec_of(model), 8, [4096])
    gains = np.array(found.gain_pct)[:, 0]
    assert found.baseline == ["dp a2a_dedup"] and gains[0] == pytest.approx(0, abs=1e-9)
    assert (np.diff(gains) > -1e-9).all() and gains[-1] > 50
    at_least = np.interp(found.least_lar[0], found.lar, gains)
    assert at_least == pytest.approx(5.0)


def test_a_dispatcher_that_sends_all_rows_everywhere_never_pays(olmoe):
    model, cluster = olmoe
    found = break_even(model, cluster, spec_of(model, dispatcher="allgather_rs"), 8, [64, 4096])
    assert found.least_lar == [None, None] and np.abs(np.array(found.gain_pct)).max() < 1e-9


def test_attention_tp_is_held_against_the_two_all_reduces_too(olmoe):
    model, cluster = olmoe
    found = break_even(model, cluster, spec_of(model, "tp_shuffled"), 8, [1, 1024])
    assert set(found.baseline) <= {"tp_scattered a2a_dedup", "tp_replicated"}
    with pytest.raises(UserError, match="no homes"):
        break_even(model, cluster, spec_of(model, "tp_replicated", None), 8, [64])


def test_a_cluster_without_figures_is_refused_with_the_remedy(olmoe):
    model, cluster = olmoe
    bare = replace(cluster, name="bare", curves=(), alpha_us=0.0)
    with pytest.raises(UserError, match="allow_roofline=true"):
        break_even(model, bare, spec_of(model), 4, [64])


def test_the_command_writes_map_and_page_and_prints_the_answer(tmp_path, capsys):
    words = ["clusters=h100x8,l40sx8", "model=olmoe-1b-7b", f"out={tmp_path}"]
    assert main(["breakeven", *words]) == 0
    told = capsys.readouterr().out
    assert "h100x8:" in told and "l40sx8:" in told
    maps = json.loads((tmp_path / "breakeven.json").read_text())["maps"]
    assert [m["cluster"] for m in maps] == ["h100x8", "l40sx8"]
    page = (tmp_path / "breakeven.html").read_text()
    assert "Least LAR that pays" in page and (tmp_path / "figures/breakeven.svg").is_file()


@pytest.mark.parametrize(
    ("word", "told"),
    [("ep_size=1", "2 to 8 ranks"), ("clusters=nowhere", "nowhere"), ("flow=tp_replicated", "no homes")],
)
def test_absurd_input_is_refused(word, told, capsys):
    extra = ["dispatcher=none"] if "replicated" in word else []
    assert main(["breakeven", "model=olmoe-1b-7b", "cluster=h100x8", word, *extra]) == 2
    assert told in capsys.readouterr().err
