"""Small clusters and models with numbers that a test can check by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from conftest import make_trace

from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.schedule.none import NoShuffle
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.traffic import Traffic
from semmoe.traffic.collective import Collective
from semmoe.traffic.locality import LocalityMeter
from simulator.cost.collectives import CollectiveCost
from simulator.cost.model import CostModel
from simulator.layer import LayerTimes
from simulator.step_timer import StepTimer

CONF = Path(__file__).resolve().parents[2] / "conf"
HIDDEN = 500  # bf16 rows of 1000 bytes


def cluster(ranks: int = 4, nodes: int = 1, **changes: Any) -> ClusterSpec:
    """alpha 10 us, 1 GB/s (so that 1000 bytes take 1 us) and no curves, unless changed."""
    fields: dict[str, Any] = {
        "name": "hand",
        "nodes": nodes,
        "ranks_per_node": ranks // nodes,
        "topology": "switch",
        "memory_gib": 80,
        "memory_gbps": 1000,
        "bf16_tflops": 100,
        "link_gbps": 1.0,
        "alpha_us": 10,
        "nic_gbps": 0.5,
        "nic_alpha_us": 20,
    }
    return ClusterSpec.from_dict(fields | changes)


def toy_model(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "toy",
        "hidden": HIDDEN,
        "num_layers": 4,
        "layer_ids": (1, 2, 3),
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn": 100,
        "vocab_size": 50,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "dense_ffn": 200,
    }
    return ModelSpec(**(fields | changes))


def spec(flow: str = "dp", dispatcher: str | None = "a2a_assignment", **changes: Any) -> DispatchSpec:
    return DispatchSpec(flow=flow, dispatcher=dispatcher, hidden=HIDDEN, top_k=2, **changes)


def traffic_of(op: str, rows_GG: Any, row_bytes: float = 1000.0, **changes: Any) -> Traffic:
    """One layer with one exchange."""
    rows_LGG = np.array(rows_GG, dtype=np.int64)[None]
    ranks = rows_LGG.shape[1]
    fields: dict[str, Any] = {
        "homes_LG": np.full((1, ranks), 5, dtype=np.int64),
        "assignment_pairs_LGG": rows_LGG,
        "rank_pairs_LGG": rows_LGG,
        "expert_rows_LG": rows_LGG.sum(axis=1),
        "active_experts_LG": np.ones((1, ranks), dtype=np.int64),
        "collectives": (Collective(op, row_bytes, rows_LGG),),
        "tokens": 5 * ranks,
    }
    return Traffic(**(fields | changes))


def timer_for(flow: str = "dp", dispatcher: str | None = "a2a_dedup", ranks: int = 4, **changes: Any) -> StepTimer:
    """A step timer over a small random trace (12 requests of 20 tokens, 3 MoE layers, 8 experts, top-2)."""
    trace = changes.pop("trace", None) or make_trace()
    experts_LP = changes.pop("experts_LP", np.tile(np.arange(8, dtype=np.int32), (3, 1)))
    placement = Placement(experts_LP, ranks, (1, 2, 3), 8)
    full_model, made = changes.pop("full_model", False), changes.pop("cluster", None) or cluster(ranks)
    dispatch = spec(flow, dispatcher, **changes)
    scheduler = NoShuffle() if flow == "tp_shuffled" else None
    planner = StepPlanner(trace, placement, dispatch, scheduler)
    cost = CostModel(toy_model(), made, dispatch, ranks)
    return StepTimer(planner, cost, LocalityMeter(3, ranks, cost.network.wiring), full_model)


@cache
def presets() -> dict[str, ClusterSpec]:
    """Every cluster of the config tree."""
    found = {}
    for path in sorted((CONF / "cluster").glob("*.yaml")):
        raw = yaml.safe_load(path.read_text())
        raw.pop("file", None)
        found[path.stem] = ClusterSpec.from_dict(raw)
    return found


def price(traffic, made, dispatch=None, **options):
    dispatch = dispatch or spec(dispatcher="low_latency")
    cost = CollectiveCost(made, dispatch, traffic.ep_size, 2, **options)
    return {name: float(us[0]) for name, us in cost.phases_us(traffic).items()}, cost


class ConstantTimer:
    """Stands for a StepTimer whose every step takes `step_ms`: a degenerate machine."""

    def __init__(self, step_ms: float) -> None:
        self.timeline, self.step_ms = timer_for().timeline, step_ms

    def run_plan(self, step, tokens, queues):
        self.timeline.plans.append(step)
        self.timeline.steps.append(LayerTimes({}, self.step_ms))
        return self.timeline.steps[-1]

    def run_ahead(self, stretch, tokens, queues):
        return [self.run_plan(stretch.first, tokens, queues).step_ms]

    def keep(self, steps):
        pass
