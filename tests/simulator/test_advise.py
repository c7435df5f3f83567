"""Advice: honest baselines, reasons for nulls, intervals around gains, a page in both forms, errors that teach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from semmoe.config import compose_all
from semmoe.errors import UserError
from simulator.advise import Desk, Layer, baselines, break_even_lar, gain_interval, judge, step_sizes, told
from simulator.advise_app import advise, render, write_html

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


def test_the_whole_advice_as_text_and_page(tmp_path: Path) -> None:
    found = advise([*SMALL, "cluster=h100x8", "workload.num_requests=12", "workload.rate_rps=40"])
    text = " ".join(render(found).split())
    words = "better baseline|What it costs|Break-even|Risk under drift|Levers|drawn from profile|experts fitted"
    for word in words.split("|"):
        assert word in text
    assert len(found.cells) == 11 and found.kind in ("gain", "open", "even")
    write_html(found, tmp_path / "advice.html", "semmoe advise")
    page = (tmp_path / "advice.html").read_text(encoding="utf-8")
    assert found.headline.split(":")[0] in page and "http://" not in page.replace("http://www.w3.org", "")


def test_fixed_batches_are_no_traffic() -> None:
    with pytest.raises(UserError, match="needs traffic"):
        advise(["workload=batches"])
