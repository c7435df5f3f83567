"""The advice as a self-contained page: the verdict, every figure drawn, the tables behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from semmoe.files import write_atomically
from semmoe.report import Section, Verdict, figure, page, prose, table
from semmoe.report.before_after import heat_maps, shares_and_bytes
from semmoe.report.draw import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    MARKERS,
    ORANGE,
    RED,
    SKY,
    WIDTH_IN,
    errors,
    frame,
    legend_below,
    plain_ticks,
    row_in,
    subplots,
)
from semmoe.report.embed import remove_files

from .app import Advice
from .judge import TIE_PCT
from .policies import ALONE, BALANCE, BOTH, NONE

NOTES = (
    "LAR: share of (token, expert) assignments served on the token's home rank.",
    "Break-even LAR: where co-scheduling would be as fast as the better baseline; empty: no LAR up to 1 would do.",
    "The interval joins the cost model's held-out error with a bootstrap over requests.",
)
SETS = {NONE: (GREY, "o"), BALANCE: (ORANGE, "s"), ALONE: (SKY, "D"), BOTH: (BLUE, "^")}
JUDGED = {"pays": (BLUE, "^"), "may pay": (BLUE, "d"), "no gain expected": (GREY, "o"), "slower": (RED, "v")}


def write_html(advice: Advice, path: Path, command: str) -> None:
    """Write the page, and its figures as PNG and SVG into `figures` beside it."""
    about = f"Gain of a layer over the better baseline; predictions within {TIE_PCT:g} % count as equal."
    sections = [
        *_figures(advice, path.parent / "figures"),
        table("cells", "Every flow and dispatcher", advice.cells, about),
        table(
            "policies",
            "Policies where co-scheduling looks best",
            advice.policies,
            "Gain over the better baseline there.",
        ),
        table("sizes", "Batch sizes", advice.sizes, "dp, a2a_dedup; exchange in percent of the layer."),
        table("levers", "Levers", advice.levers, "Against one copy per assignment without policies."),
        prose("notes", "How to read it", NOTES),
    ]
    verdict = Verdict(advice.kind, advice.headline, advice.points)
    write_atomically(path, page(f"semmoe advise: {advice.title}", sections, verdict, command=command))


def _figures(advice: Advice, folder: Path) -> Iterator[Section]:
    for name, (heading, draw) in FIGURES.items():
        drawn = draw(advice)
        if drawn is None:
            remove_files(f"fig_{name}", folder)
            continue
        caption = " ".join((draw.__doc__ or "").split())
        yield figure(f"fig_{name}", heading, drawn, caption, f"{heading}. {caption} {advice.headline}", folder)


def gains(advice: Advice) -> Any:
    """Time of a layer that co-scheduling saves against the better baseline, with its 80 % interval; most on top. An interval
    that holds 0 decides nothing."""
    ordered = advice.cells.sort_values("gain %", ascending=False, kind="stable")
    names = [f"{c['flow']}, {c['dispatcher']}, {c['step']}" for c in ordered.to_dict("records")]
    return _forest(ordered, names, [JUDGED[verdict] for verdict in ordered["verdict"]], ordered["verdict"].tolist())


def policy_sets(advice: Advice) -> Any:
    """Gain of every policy set over the better baseline, where co-scheduling looks best; the baseline itself is 0."""
    rows = advice.policies.to_dict("records")
    names = [f"{r['step']}, {r['flow']}, {r['dispatcher']}: {r['policies']}" for r in rows]
    return _forest(advice.policies, names, [SETS[r["policies"]] for r in rows])


def _forest(rows: pd.DataFrame, names: list[str], marks: list[tuple[str, str]], words: Sequence[str] = ()) -> Any:
    """Points with whiskers down the page, around the line of no gain. words: what each colour means, for a legend."""
    drawn, axes = subplots(figsize=(WIDTH_IN, 0.9 + row_in(names) * len(names)))
    axes.axvline(0, color=BLACK, linewidth=1)
    shown: set[str] = set()
    for place, (row, (colour, marker)) in enumerate(zip(rows.to_dict("records"), marks, strict=True)):
        word = words[place] if words else ""
        ends = errors([row["gain %"]], [row["low %"]], [row["high %"]])
        axes.errorbar([row["gain %"]], [place], xerr=ends, fmt=marker, color=colour, markersize=6, capsize=3,
                      label=None if word in shown else word)  # fmt: skip
        shown.add(word)
    frame(axes, names, "time of a layer saved against the better baseline (%)")
    if words:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)
    return drawn


def locality(advice: Advice) -> Any:
    """A line a cell, from the same dispatcher without policies to co-scheduling: LAR to the right, gain upwards; a level
    line is locality that buys nothing. The cross is the LAR at which it would break even."""
    cells = advice.cells
    steps = list(dict.fromkeys(cells["step"]))
    names = list(dict.fromkeys(cells["flow"] + ", " + cells["dispatcher"]))
    drawn, every = subplots(1, len(steps), figsize=(WIDTH_IN, 3.6), squeeze=False)
    signs: dict[str, Any] = {}
    for axes, step in zip(every[0], steps, strict=True):
        axes.axhline(0, color=BLACK, linewidth=1)
        for cell in cells[cells["step"] == step].to_dict("records"):
            name = f"{cell['flow']}, {cell['dispatcher']}"
            colour, marker = COLOURS[names.index(name) % 8], MARKERS[names.index(name) % 5]
            before = 100 * (1 - cell["twin ms"] / cell["baseline ms"])
            axes.plot([cell["LAR before"], cell["LAR"]], [before, cell["gain %"]], color=colour, linewidth=1.2)
            (signs[name],) = axes.plot([cell["LAR"]], [cell["gain %"]], color=colour, marker=marker, linestyle="none")
            if np.isfinite(cell["break-even LAR"]):
                axes.plot([cell["break-even LAR"]], [0], color=colour, marker="x", markersize=8, linestyle="none")
        axes.set(xlabel="LAR (share of assignments at home)", xlim=(0, 1))
        axes.set_title(f"{step} steps", loc="left", fontsize=9)
    legend_below(drawn, signs)
    every[0][0].set_ylabel("time of a layer saved (%)")
    return drawn


def batch_sizes(advice: Advice) -> Any:
    """Left: exchange in percent of a layer, the most that locality can save. Right: what co-scheduling saves against the better
    baseline; where the line crosses 0 is the break-even batch (dp, a2a_dedup)."""
    drawn, (left, right) = subplots(1, 2, figsize=(WIDTH_IN, 3.2))
    sizes = advice.sizes
    tokens = sizes["tokens/rank"]
    left.plot(tokens, sizes["exchange before %"], color=ORANGE, marker="o", label="no policies")
    left.plot(tokens, sizes["exchange %"], color=BLUE, marker="s", label="co-scheduled")
    left.set(ylabel="exchange (% of an MoE layer)", ylim=(0, 100))
    left.legend()
    right.axhline(0, color=BLACK, linewidth=1)
    right.plot(tokens, sizes["gain %"], color=BLUE, marker="s")
    right.set_ylabel("time of a layer saved (%)")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="tokens a rank in a batch")
        plain_ticks(axes.xaxis, (tokens.min(), tokens.max()))
    return drawn


def per_layer(advice: Advice) -> Any:
    """LAR and imbalance (busiest rank / mean, a step) of every MoE layer in the best cell, without policies and
    co-scheduled."""
    drawn, (left, right) = subplots(1, 2, figsize=(WIDTH_IN, 3.0))
    sides = ((advice.before, "no policies", ORANGE, "o"), (advice.after, "co-scheduled", BLUE, "s"))
    for layer, label, colour, marker in sides:
        if layer.meter is not None:
            left.plot(layer.meter.lar_per_layer_L(), color=colour, marker=marker, markersize=3, label=label)
            right.plot(layer.meter.imbalance_per_layer_L(), color=colour, marker=marker, markersize=3)
    left.set(xlabel="MoE layer", ylabel="local activation rate", ylim=(0, 1))
    right.set(xlabel="MoE layer", ylabel="busiest rank / mean, a step", ylim=(1, None))
    left.legend()
    return drawn


def pair_traffic(advice: Advice) -> Any:
    """The best cell without policies on the left, co-scheduled on the right. Above: where a home rank's (token, expert)
    assignments are served, in percent; the framed diagonal stays local. Below: payload bytes that dispatch sends between each
    pair of ranks."""
    sides = []
    for name, layer in (("no policies", advice.before), ("co-scheduled", advice.after)):
        meter = layer.meter
        if meter is None or not meter.assignment_pairs_LGG.any():
            continue
        pairs = (meter.assignment_pairs_LGG.sum(axis=0), meter.rank_pairs_LGG.sum(axis=0))
        sent = meter.bytes_by_op.get("dispatch", 0.0) / max(meter.steps, 1)
        sides.append((name, layer.lar, *shares_and_bytes(*pairs, layer.name.split()[-1], sent)))
    return heat_maps(sides) if sides else None


FIGURES: dict[str, tuple[str, Callable[[Advice], Any]]] = {  # in the order of the page
    "gains": ("Does it pay?", gains),
    "policy_sets": ("Which policies", policy_sets),
    "locality": ("Locality, and what it buys", locality),
    "batch_sizes": ("Communication share and gain by batch size", batch_sizes),
    "per_layer": ("LAR and imbalance by layer, before and after", per_layer),
    "pair_traffic": ("Who sends to whom, before and after", pair_traffic),
}
