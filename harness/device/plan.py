"""Planning a layer where it runs (measure.plan=device): every rank finds the same homes by itself, without the host.

    token ids, slots carried by the SAG of the layer before -> scores (tables) -> homes (prices) -> ShufflePlan

All ranks hold the ids and slots of all tokens and equal tables, and all is integer arithmetic: no rank asks another, and the
homes are those of a StepPlanner with the same predictor and `schedule/priced.py`. With kernels nothing reads the device, so
that a graph can hold it. The host still hands over the routes that a measured run forces; none of that time is planning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semmoe.errors import UserError
from semmoe.planning import RoutedStep, StepPlanner, gather_slots
from semmoe.predict.tables import ScoreTables
from semmoe.run import Run
from semmoe.schedule.base import capacity_of
from semmoe.schedule.priced import MOST_SPREAD, Priced

from ..transport.plan import HomeScores
from ..transport.pull import launching

if TYPE_CHECKING:
    from ..kernels.scores import DeviceTables

HOST, DEVICE = "host", "device"


class DevicePlan:
    """Homes of the layers of a run on one rank, step after step. kernels: scores by the Triton kernel, else by numpy."""

    def __init__(self, run: Run, device: torch.device, kernels: bool = False) -> None:
        placement, predictor = run.fitted.placement, run.fitted.predictor
        self.tables: list[ScoreTables] = [predictor.tables(layer, placement) for layer in range(placement.num_layers)]
        for tables in self.tables:
            if tables.spread() >= MOST_SPREAD:
                raise UserError(
                    f"measure.plan=device: scores of predictor {type(predictor).__name__} span {tables.spread()}; "
                    "token_scheduler=priced takes less than 2^24 (256 assignments)"
                )
        self.device_tables = _on_device(self.tables, device) if kernels else []
        self._ranks, self._home_cap, self._device = run.ep_size, run.recipe.home_cap, device
        self._slots_Tk = self._row_T = torch.zeros(0, dtype=torch.int64, device=device)

    def capacity(self, tokens: int) -> int:
        """Most tokens at home on a rank."""
        return capacity_of(tokens, self._ranks, self._home_cap)

    def homes(self, layer: int, token_T: Tensor) -> HomeScores:
        """To be assigned by the layer; layers in order, each after `carried` of the one before."""
        score_TG, self._row_T = self._scores(layer, token_T)
        return HomeScores(score_TG, self.capacity(len(token_T)))

    def carried(self, slots_Tk: Tensor | None) -> None:
        """The slots of every token that came with the SAG of the layer just run, where SAG carries them."""
        if slots_Tk is not None:
            self._slots_Tk = slots_Tk

    def _scores(self, layer: int, token_T: Tensor) -> tuple[Tensor, Tensor]:
        asked = token_T, self._slots_Tk, self._row_T
        if self.device_tables:
            from ..kernels.scores import score_tokens  # imports Triton

            with launching(self._device):
                return score_tokens(self.device_tables[layer], *asked)
        score_TG, row_T = self.tables[layer].scores(*(tensor.cpu().numpy() for tensor in asked))
        return torch.from_numpy(score_TG).to(self._device), torch.from_numpy(row_T).to(self._device)


def _on_device(tables_L: list[ScoreTables], device: torch.device) -> list[DeviceTables]:
    from ..kernels.scores import DeviceTables  # imports Triton

    return [DeviceTables.of(tables, device) for tables in tables_L]


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
