"""Planning as single operations for `rotate`: every token scheduler's homes, every predictor's look-up, one shuffle plan.

By the wall clock of all ranks together: every rank plans the same step, and a layer waits for all. Keys, n tokens:

    ("homes." + scheduler, n)   homes and slots of all layers, scores being known (a scheduler that sees the routes: theirs too)
    ("scores." + predictor, n)  what the predictor tells the scheduler, of all layers
    ("plan.tp_scattered", n)    the shuffle plan of one layer: permutation, counts, this rank's tokens

`planning_terms` makes the cost model's terms of them (simulator/cost/host.py), per layer. Built-in policies and the
configured ones are timed; tables are as large as in earnest, their content matters little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from semmoe.dispatch import DispatchSpec
from semmoe.placement.base import Placement
from semmoe.planning import StepPlanner
from semmoe.predict.device_ngram import DeviceNgram
from semmoe.predict.fusion import Fusion
from semmoe.predict.oracle import Oracle
from semmoe.predict.paper import Paper
from semmoe.predict.token_table import TokenTable
from semmoe.profile import Profile
from semmoe.rows import label
from semmoe.run import Run
from semmoe.schedule.confident_first import ConfidentFirst
from semmoe.schedule.none import NoShuffle
from semmoe.schedule.oracle_tokens import OracleTokens
from semmoe.schedule.priced import Priced
from semmoe.schedule.rehome import Rehome
from semmoe.schedule.semantic import Semantic
from semmoe.schedule.sort_cut import SortCut

from ..transport.plan import ShufflePlan
from ..worker import RankContext
from .local_work import Operations
from .rotation import clocked

PARTS = ("homes.", "scores.", "plan.")  # how keys begin
Points = dict[tuple[str, int], tuple[float, float]]  # (what, tokens) -> (tokens, microseconds)


class KnownScores:
    """A predictor that has been asked already."""

    def __init__(self, score_LTG: Sequence[NDArray[np.int32]]) -> None:
        self.score_LTG = score_LTG

    def scores(
        self, token_ids_T: NDArray[np.integer], layer: int, history: NDArray[np.integer] | None, placement: Placement
    ) -> tuple[NDArray[np.int32], None]:
        return self.score_LTG[layer], None


def plan_operations(
    context: RankContext, run: Run, spec: DispatchSpec, predictors: Mapping[str, Any], tokens: Sequence[int]
) -> Operations:
    """Every scheduler and predictor at n tokens of the held-out trace. spec: of tp_shuffled; predictors: fitted, by label."""
    operations: Operations = {}
    rng = np.random.default_rng(0)
    layers = range(run.heldout.num_layers)
    asking = {name: _planner(run, spec, NoShuffle(), made) for name, made in predictors.items()}
    for n in tokens:
        rows_T = rng.integers(0, run.heldout.num_tokens, n)
        known = KnownScores([asking["token_table"].scores(rows_T, layer) for layer in layers])
        for name, made in _schedulers(run).items():
            operations[f"homes.{name}", n] = clocked(partial(_planner(run, spec, made, known).route, rows_T, None))
        for name, planner in asking.items():
            operations[f"scores.{name}", n] = clocked(partial(_look_up, planner, rows_T))
        homes_T = rng.integers(0, context.ranks, n)
        operations["plan.tp_scattered", n] = clocked(partial(_shuffle_plan, homes_T, context.ranks, context.rank))
    return operations


def planning_terms(points: Mapping[tuple[str, int], tuple[float, float]], layers: int) -> Points:
    """Points of "plan.<scheduler>", "plan.<predictor>", "plan.tp_scattered" and, for any other policy, "plan.tp_shuffled":
    exact homes by a token table. points: those of the operations, all layers together."""
    terms: Points = {}
    for (what, n), (rows, us) in points.items():
        part, name = what.split(".", 1)
        shuffle_us = points["plan.tp_scattered", n][1]
        each_us = {"homes": us / layers + shuffle_us, "scores": us / layers, "plan": us}[part]
        terms[f"plan.{name}", n] = (rows, each_us)
    for n in [n for what, n in terms if what == "plan.semantic"]:
        terms["plan.tp_shuffled", n] = (float(n), terms["plan.semantic", n][1] + terms["plan.token_table", n][1])
    return terms


def fitted_predictors(run: Run) -> dict[str, Any]:
    """The built-in predictors and the configured one by label, fitted on the training part."""
    profile = Profile.fit(run.train)
    made = {
        _name(type(p)): p for p in (TokenTable(), DeviceNgram(), Paper(), Fusion(fit_tokens=512, refine=0.0), Oracle())
    }
    for predictor in made.values():
        predictor.fit(profile)
    own = run.fitted.predictor
    return made if own is None else made | {label(run.cfg["predictor"]): own}


def _schedulers(run: Run) -> dict[str, Any]:
    builtin = (NoShuffle, Semantic, SortCut, ConfidentFirst, Priced, Rehome, OracleTokens)
    made = {_name(kind): kind() for kind in builtin}
    return made | {label(run.cfg["token_scheduler"]): run.recipe.make_token_scheduler()}


def _name(kind: type) -> str:
    return label({"_target_": f"{kind.__module__}.{kind.__qualname__}"})


def _planner(run: Run, spec: DispatchSpec, scheduler: Any, predictor: Any) -> StepPlanner:
    placement = run.fitted.placement
    router = run.recipe.make_replica_router() if placement.has_replicas else None
    return StepPlanner(run.heldout, placement, spec, scheduler, predictor, router, run.recipe.home_cap)


def _look_up(planner: StepPlanner, rows_T: NDArray[np.int64]) -> None:
    for layer in range(planner.trace.num_layers):
        planner.scores(rows_T, layer)


def _shuffle_plan(homes_T: NDArray[np.integer], ranks: int, rank: int) -> Tensor:
    return ShufflePlan.from_homes(homes_T, ranks).mine_T(rank)
