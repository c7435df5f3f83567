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
from semmoe.predict.tables import Rows, ScoreTables
from semmoe.run import Run
from semmoe.schedule.base import capacity_of
from semmoe.schedule.priced import MOST_SPREAD, Priced

from .transport.plan import HomeScores

HOST, DEVICE = "host", "device"


class LayerScores:
    """A predictor's scores before one layer, from tables that lie on `device` (semmoe/predict/tables.py)."""

    def __init__(self, tables: ScoreTables, device: torch.device) -> None:
        def put(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        chain = tables.chain
        _check_spread(tables.token, chain.rows)
        self.row_V = put(tables.row_V, torch.int64)
        self.token_SG, self.token_sure_S = (
            put(tables.token.score_SG, torch.int32),
            put(tables.token.sure_S, torch.float32),
        )
        self.chain_SG, self.chain_sure_S = put(chain.rows.score_SG, torch.int32), put(chain.rows.sure_S, torch.float32)
        self.held_PG = None if chain.held_PG is None else put(chain.held_PG, torch.int32)
        self.weight, self.drop, self.ranks = chain.weight, chain.drop, self.chain_SG.shape[1]

    def __call__(self, token_T: Tensor, slots_Tk: Tensor | None, earlier_row_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """(score_TG int32, chain_row_T int64). token_T: int64 ids; slots_Tk: integer slots that served the tokens in the
        layer before, and earlier_row_T: its chain_row_T; neither is looked at where nothing is looked back at."""
        chain_row_T = self._chain_row(token_T, slots_Tk, earlier_row_T)
        token_row_T = self.row_V.index_select(0, token_T)
        sure_T, chain_sure_T = (
            self.token_sure_S.index_select(0, token_row_T),
            self.chain_sure_S.index_select(0, chain_row_T),
        )
        token_TG, chain_TG = self.token_SG.index_select(0, token_row_T), self.chain_SG.index_select(0, chain_row_T)
        return torch.where((sure_T > chain_sure_T)[:, None], token_TG, chain_TG), chain_row_T

    def _chain_row(self, token_T: Tensor, slots_Tk: Tensor | None, earlier_row_T: Tensor | None) -> Tensor:
        if self.held_PG is None:
            return torch.zeros_like(token_T)
        assert slots_Tk is not None and earlier_row_T is not None
        held_TG = self.held_PG.index_select(0, slots_Tk.reshape(-1).long()).view(*slots_Tk.shape, self.ranks).sum(dim=1)
        lower_first_G = torch.arange(self.ranks - 1, -1, -1, device=token_T.device)
        device_T = (held_TG * self.ranks + lower_first_G).argmax(dim=1)  # no ties are left
        return device_T * self.weight + torch.div(earlier_row_T, self.drop, rounding_mode="floor")


class DevicePlan:
    """Homes of the layers of a run on one rank, step after step."""

    def __init__(self, run: Run, device: torch.device) -> None:
        placement, predictor = run.fitted.placement, run.fitted.predictor
        self.layers = [LayerScores(predictor.tables(layer, placement), device) for layer in range(placement.num_layers)]
        self._ranks, self._home_cap = run.ep_size, run.recipe.home_cap
        self._slots_Tk: Tensor | None = None
        self._row_T: Tensor | None = None

    def capacity(self, tokens: int) -> int:
        """Most tokens at home on a rank."""
        return capacity_of(tokens, self._ranks, self._home_cap)

    def homes(self, layer: int, token_T: Tensor) -> HomeScores:
        """To be assigned by the layer; layers in order, each after `carried` of the one before."""
        score_TG, self._row_T = self.layers[layer](token_T, self._slots_Tk, self._row_T)
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


def _check_spread(*tables: Rows) -> None:
    """What the kernel of home assignment cannot check without a read of the device."""
    lowest, highest = min(rows.score_SG.min() for rows in tables), max(rows.score_SG.max() for rows in tables)
    if int(highest) - int(lowest) >= MOST_SPREAD:
        raise UserError("a predictor's tables span 2^24 or more (256 assignments); token_scheduler=priced takes less")
