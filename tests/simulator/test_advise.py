"""Advice: honest baselines, reasons for nulls, intervals around gains, a page in both forms, errors that teach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import browser

import semmoe
from semmoe.config import compose_all
from semmoe.errors import UserError
from semmoe.trace import RoutingTrace
from simulator.advise.app import Advice, advise, render
from simulator.advise.desk import Desk, Layer, step_sizes
from simulator.advise.drift import elsewhere
from simulator.advise.judge import Cell, baselines, break_even_lar, gain_interval, judge, told
from simulator.advise.page import FIGURES, write_html
from simulator.advise.policies import ALONE, BALANCE, BOTH, NONE, Tried, best_said, better_still
from simulator.breakeven import main as breakeven

TINY = Path(semmoe.__file__).parent / "assets/traces/tiny_docs.npz"
SMALL = ("model=deepseek-v2-lite", "trace=profile", "trace.requests=24", "trace.prompt_len=32", "trace.output_len=8",
         "trace.layer_ids=[1,2]", "model.layer_ids=[1,2]", "model.num_layers=3")  # fmt: skip


def layer(name: str, exchange: float, experts: float, lar: float = 0.2) -> Layer:
    return Layer(name, {"dispatch": np.full(3, exchange), "experts": np.full(3, experts)}, lar, 1.1)


def test_the_baseline_is_the_fastest_without_policies_and_dense_dispatch_gains_nothing() -> None:
    (config,) = compose_all([*SMALL, "cluster=h100x8", "workload=batches", "cost.allow_roofline=true"])
    desk, known = Desk(config), {}
    cell = judge(desk, "dp", "allgather_rs", "prefill", 64, known)
    rivals = baselines(desk, "dp", "prefill", 64, known)
    assert cell.baseline_ms == min(r.ms for r in rivals) and len(rivals) == 3
    assert cell.gain_pct < 1 and cell.low_pct <= cell.gain_pct <= cell.high_pct
    assert cell.verdict in ("no gain expected", "slower")
    wide = gain_interval(rivals[0], rivals[1], desk.run("dp", "a2a_dedup"))
    assert wide[0] < wide[1]


@pytest.mark.parametrize(
    ("ours", "best", "twin", "dispatcher", "verdict", "why"),
    [
        (layer("", 0.5, 1), layer("b", 1, 1), layer("b", 1, 1), "a2a_dedup", "pays", "saves 500 us"),
        (layer("", 1, 1), layer("b", 1, 1), layer("b", 1, 1), "allgather_rs", "no gain expected", "dense"),
        (layer("", 0.7, 1.3), layer("b", 1, 1), layer("b", 1, 1), "a2a_dedup", "no gain expected", "imbalance eats it"),
        (layer("", 1, 1, 0.6), layer("b", 1, 1), layer("b", 1, 1), "a2a_dedup", "no gain expected", "floor-bound"),
        (layer("", 1, 1), layer("b", 0.5, 1), layer("t", 2, 1), "a2a_dedup", "slower", "b without any is faster still"),
    ],
)
def test_every_null_has_its_reason(ours, best, twin, dispatcher: str, verdict: str, why: str) -> None:
    gain = 100 * (1 - ours.ms / best.ms)
    said = told(ours, best, twin, gain, gain - 0.5, gain + 0.5, dispatcher)
    assert said[0] == verdict and why in said[1]


def test_break_even_lar_lies_on_the_line_of_exchange_time() -> None:
    ours, twin, best = layer("", 0.6, 1, 0.6), layer("t", 1.0, 1, 0.2), layer("b", 0.8, 1)
    assert break_even_lar(ours, twin, best) == pytest.approx(0.4)
    assert np.isnan(break_even_lar(ours, layer("t", 0.6, 1, 0.2), best))


def test_step_sizes_are_of_a_decode_and_of_a_large_step() -> None:
    assert step_sizes([16] * 90 + [4096] * 10, 8) == (2, 512)
    assert step_sizes([1], 8) == (1, 1)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Advice:
    folder = tmp_path_factory.mktemp("advise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("simulator.advise.judge.LADDER", (16, 256))
        patch.setattr("simulator.advise.desk.SAMPLES", 3)
        return advise(
            [*SMALL, "cluster=h100x8", "workload.num_requests=12", "workload.rate_rps=40", f"results_dir={folder}"]
        )


@pytest.fixture(scope="module")
def pages(found: Advice, tmp_path_factory) -> dict[str, Path]:
    """The pages of `semmoe advise` and `semmoe breakeven`."""
    folder = tmp_path_factory.mktemp("pages")
    write_html(found, folder / "advice.html", "semmoe advise")
    assert breakeven(["clusters=h100x8", "model=olmoe-1b-7b", f"out={folder / 'map'}"]) == 0
    return {"advise": folder / "advice.html", "breakeven": folder / "map/breakeven.html"}


def test_the_whole_advice_as_text(found: Advice) -> None:
    text = " ".join(render(found).split())
    words = (
        "better baseline|Best policy|What it costs|Break-even|Risk under drift|Levers|drawn from profile|experts fitted"
    )
    for word in words.split("|"):
        assert word in text
    assert len(found.cells) == 12 and found.kind in ("gain", "open", "even")
    assert ("tp_shuffled", "low_latency") in set(zip(found.cells.flow, found.cells.dispatcher, strict=True))
    assert set(found.policies.policies) == {NONE, BALANCE, ALONE, BOTH} and len(found.policies) == 16
    assert (found.policies[found.policies.policies == NONE]["gain %"] == 0).all()
    best = found.policies[found.policies.step == "prefill"].sort_values("layer ms").iloc[0]
    assert f"prefill: {best.policies} ({best.flow}, {best.dispatcher})" in dict(found.points)["Best policy"]


def test_the_page_holds_every_figure_and_table_and_fetches_nothing(found: Advice, pages: dict[str, Path]) -> None:
    text = pages["advise"].read_text(encoding="utf-8")
    assert found.headline.split(":")[0] in text and "http://" not in text.replace("http://www.w3.org", "")
    for name in FIGURES:
        assert f'id="fig_{name}"' in text and (pages["advise"].parent / f"figures/fig_{name}.svg").is_file(), name
    assert all(f'data-table="{name}-table"' in text for name in ("cells", "policies", "sizes", "levers")), (
        "no table copies"
    )


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.mark.parametrize(("name", "figures"), [("advise", len(FIGURES)), ("breakeven", 1)])
def test_a_browser_draws_every_figure_without_errors(pages: dict[str, Path], chromium, name: str, figures: int) -> None:
    for width, media, scheme in ((1280, "screen", "light"), (400, "screen", "dark"), (800, "print", "light")):
        chromium.open(pages[name], width, media, scheme)
        drawn = "[...document.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().height > 50).length"
        assert chromium.evaluate(drawn) == figures and chromium.console == []
        assert chromium.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "the page scrolls sideways"


def tried(policy: str, ms: float, phase: str = "decode") -> Tried:
    return Tried(policy, "dp", "a2a_dedup", phase, 16, ms, 100 * (1 - ms), -1.0, 9.0, 0.2, 1.1)


def test_the_best_policy_is_the_fastest_of_those_tried_and_ties_are_said() -> None:
    rows = [
        tried(BOTH, 0.97),
        tried(BALANCE, 0.9),
        tried(NONE, 1.0),
        tried(NONE, 1.0, "prefill"),
        tried(BOTH, 1.005, "prefill"),
    ]
    said = best_said(rows)
    assert said.startswith(
        f"decode: {BALANCE} (dp, a2a_dedup), +10.0 % over the better baseline (-1.0 to +9.0), 7.2 % ahead of"
    )
    assert f"prefill: {NONE} (dp, a2a_dedup), not told apart from the next: {BOTH}" in said


def test_a_simpler_policy_that_gains_more_stands_in_the_headline() -> None:
    cell = Cell("dp", "a2a_dedup", "decode", 16, "", 1.0, 1.0, 0.97, 3.0, 1.0, 5.0, 0.1, 0.5, 0.4, "pays", "")
    rows = [tried(BOTH, 0.97), tried(BALANCE, 0.9), tried(NONE, 1.0), tried(ALONE, 0.5, "prefill")]
    assert better_still(cell, rows) == f" Simpler and better there: {BALANCE}, +10.0 %."
    assert better_still(cell, [tried(BOTH, 0.97), tried(BALANCE, 0.965), tried(NONE, 1.0)]) == ""


def test_drift_of_a_recorded_trace_is_judged_by_its_domains_or_its_time() -> None:
    train, heldout = RoutingTrace.load(TINY).split(0.5, 0)
    learned, here, there, words = elsewhere(train, heldout)
    assert (
        "on the rest" in words
        and set(learned.domain_R) == set(here.domain_R)
        and not set(here.domain_R) & set(there.domain_R)
    )

    def plain(trace: RoutingTrace, arrivals: np.ndarray | None) -> RoutingTrace:
        return replace(trace, domain_R=np.full(trace.num_requests, "x"), arrival_ms_R=arrivals)

    _, here, there, words = elsewhere(*(plain(t, np.arange(float(t.num_requests))) for t in (train, heldout)))
    assert "later half" in words and here.arrival_ms_R.max() < there.arrival_ms_R.min()
    assert elsewhere(plain(train, None), plain(heldout, None)) is None


def test_fixed_batches_are_no_traffic() -> None:
    with pytest.raises(UserError, match="needs traffic"):
        advise(["workload=batches"])
