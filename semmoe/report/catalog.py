"""All figures of a comparison's report, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..compare import Comparison
from ..results import SERVED
from .before_after import pair_traffic, step_timeline
from .figures import THREE, fan_out, gain, imbalance, latency, locality, parity, per_layer, phases, served
from .sweeps import batch_sizes, rates


@dataclass(frozen=True)
class Entry:
    """A figure of the report: heading, how it is drawn (its docstring is the caption), columns that its alt text sums up."""

    heading: str
    draw: Callable[[Comparison], Any]
    columns: Sequence[str]

    @property
    def caption(self) -> str:
        return (self.draw.__doc__ or "").strip()

    def alt(self, table: pd.DataFrame) -> str:
        """What the picture shows, for who does not see it: heading, caption, and the range of each column."""
        told = []
        for name in self.columns:
            values = table[name].dropna().astype(float)
            if len(values):
                told.append(f"{name.replace('_', ' ')} {values.min():.4g} to {values.max():.4g}")
        return f"{self.heading}. {self.caption} {len(table)} configurations: {'; '.join(told)}."


def _both(name: str) -> tuple[str, str]:
    return (f"{name}_ms_predicted", f"{name}_ms_measured")


_LAR = [f"lar_{when}" for when, *_ in THREE]
FIGURES = {
    "gain": Entry("Does it pay?", gain, ("gain_pct",)),
    "latency": Entry("Layer latency, predicted and measured", latency, _both("layer")),
    "parity": Entry("Predicted against measured", parity, _both("layer")),
    "phases": Entry("Where a layer's time goes", phases, _both("layer")),
    "locality": Entry("Local activation rate (LAR)", locality, _LAR),
    "fan_out": Entry("Fan-out", fan_out, [f"fan_out_{w}" for w, *_ in THREE]),
    "per_layer": Entry("LAR, fan-out and imbalance by layer", per_layer, ("lar_measured", "fan_out_measured")),
    "imbalance": Entry("Imbalance", imbalance, ("imbalance_step", "imbalance_total", "home_imbalance")),
    "pair_traffic": Entry("Who sends to whom, before and after", pair_traffic, _LAR),
    "step_timeline": Entry("Timeline of a step, before and after", step_timeline, ("layer_ms_predicted",)),
    "batch_sizes": Entry("Batch size: exchange and break-even", batch_sizes, ("batch_tokens", "gain_pct")),
    "rates": Entry("Latency against throughput", rates, ("rate_rps", "ttft_ms_predicted", "ttft_ms_measured")),
    "served": Entry("Served requests", served, [c for n in SERVED for c in _both(n)]),
}
