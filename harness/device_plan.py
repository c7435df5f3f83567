"""Planning a layer where it runs (measure.plan=device): every rank finds the same homes by itself, without the host.

    token ids, slots carried by the SAG of the layer before -> scores (tables) -> homes (prices) -> ShufflePlan

All ranks hold the ids and slots of all tokens and equal tables, and all is integer arithmetic: no rank asks another, and the
homes are those of a StepPlanner with the same predictor and `schedule/priced.py`. Nothing reads the device, so that a graph can
hold it. The host still hands over the routes that a measured run forces; none of its time is planning.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.planning import RoutedStep, StepPlanner, gather_slots
from semmoe.run import Run
from semmoe.schedule.base import capacity_of
from semmoe.schedule.priced import Priced

from .reference.scores import LayerScores
from .transport.plan import HomeScores
from .transport.pull import launching

HOST, DEVICE = "host", "device"


class DevicePlan:
    """Homes of the layers of a run on one rank, step after step. kernels: scores by the Triton kernel."""

    def __init__(self, run: Run, device: torch.device, kernels: bool = False) -> None:
        placement, predictor = run.fitted.placement, run.fitted.predictor
        self.layers = [LayerScores(predictor.tables(layer, placement), device) for layer in range(placement.num_layers)]
        self._ranks, self._home_cap, self._kernels = run.ep_size, run.recipe.home_cap, kernels
        self._slots_Tk: Tensor | None = None
        self._row_T: Tensor | None = None

    def capacity(self, tokens: int) -> int:
        """Most tokens at home on a rank."""
        return capacity_of(tokens, self._ranks, self._home_cap)

    def homes(self, layer: int, token_T: Tensor) -> HomeScores:
        """To be assigned by the layer; layers in order, each after `carried` of the one before."""
        asked = self.layers[layer], token_T, self._slots_Tk, self._row_T
        score_TG, self._row_T = _by_kernel(*asked) if self._kernels else LayerScores.__call__(*asked)
        return HomeScores(score_TG, self.capacity(len(token_T)))

    def carried(self, slots_Tk: Tensor | None) -> None:
        """The slots of every token that came with the SAG of the layer just run."""
        self._slots_Tk = slots_Tk


class RoutesAlone(StepPlanner):
    """A StepPlanner where ranks plan: the routes of a step as slots, without homes, and no time that counts as planning."""

    def route(self, rows_T: NDArray[np.int64], queue_T: NDArray[np.integer] | None) -> RoutedStep:
        return RoutedStep(rows_T, None, gather_slots(self.trace.experts_TLk, rows_T, self.placement.first_slot_LE))


def planner_of(run: Run) -> StepPlanner:
    """What gives every step of a measured run its slots and, where the host plans, its homes."""
    if planned_on(run) == DEVICE:
        return RoutesAlone(run.heldout, run.fitted.placement, run.spec, Priced())
    return run.planner()


def planned_on(run: Run) -> str | None:
    """Column planned_on: who plans the homes of every layer; None where the flow gives them. UserError for
    measure.plan=device with what has no device form."""
    if run.cfg["measure"]["plan"] != DEVICE:
        return HOST if run.spec.flow == "tp_shuffled" else None
    problem = _problem(run)
    if problem is not None:
        raise UserError(f"measure.plan=device: {problem}, or leave planning to measure.plan=host")
    return DEVICE


def _problem(run: Run) -> str | None:
    """What keeps ranks from planning this run themselves, with its remedy."""
    if run.spec.flow != "tp_shuffled":
        return f"flow={run.spec.flow} plans no homes layer by layer; set flow=tp_shuffled"
    if run.scope != "moe_layers":
        return f"scope={run.scope} is planned on the host; set scope=moe_layers"
    scheduler, predictor = type(run.recipe.make_token_scheduler()), run.fitted.predictor
    if scheduler is not Priced:
        return f"token scheduler {scheduler.__name__} has no device form; set token_scheduler=priced"
    if not hasattr(predictor, "tables"):
        name = "none" if predictor is None else type(predictor).__name__
        return f"predictor {name} is no look-up in tables; set predictor=paper, device_ngram or token_table"
    if run.fitted.placement.has_replicas:
        return f"the host chooses among replicas ({run.recipe.slots} slots); set placement.slots=null"
    return None


def _by_kernel(tables: LayerScores, token_T: Tensor, *earlier: Tensor | None) -> tuple[Tensor, Tensor]:
    from .kernels.scores import score_tokens  # imports Triton

    with launching(token_T.device):
        return score_tokens(tables, token_T, *earlier)
