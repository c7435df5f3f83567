"""Exact placement of small cases: every placement that a bound does not rule out is solved for its homes.

1. A good placement from random starts of the alternation. 2. Enumeration of all placements with Lagrangian bounds
(enumeration.py). 3. Homes of the survivors: exact flow where items weigh the same, HiGHS in order of their bounds where
not. The value is then proved: no placement has more assignments served at home.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .base import Placement, PlacementProblem
from .enumeration import placements, survivors
from .lagrangian import upper_bound
from .program import Program, best_homes, programs_of, ranks_of
from .search_clock import search_s

KEEP = 200_000


class Exact:
    """The 0-1 program of the paper, solved to a proved optimum (small cases only; a UserError says when too large).

    home_cap: a home carries at most this many times the mean. starts: random starts of the first incumbent.
    notes: value (assignments served at home), bound, gap (0 where proved).
    """

    def __init__(self, home_cap: float = 1.10, starts: int = 8) -> None:
        if not home_cap >= 1 or starts < 1:
            raise UserError(f"placement.home_cap={home_cap} and placement.starts={starts} must be at least 1")
        self.home_cap, self.starts = home_cap, starts

    def place(self, problem: PlacementProblem) -> Placement:
        if problem.slots != problem.model.num_experts:
            raise UserError("placement=exact has no replicas and needs ep_size to divide the number of experts")
        programs = programs_of(problem, self.home_cap)
        limit_s = problem.time_limit_s / len(programs)
        solved = [solve(program, problem.rng(), self.starts, limit_s) for program in programs]
        value, bound = sum(s.value for s in solved), sum(s.bound for s in solved)
        notes = {"value": value, "bound": bound, "gap": relative_gap(value, bound)}
        rank_LE = np.concatenate([s.rank_LE for s in solved])
        return Placement.from_ranks(rank_LE, problem.ep_size, problem.layer_ids, notes)


@dataclass(frozen=True, eq=False)
class Solved:
    """rank_LE with `value` assignments at home; no placement has more than `bound`."""

    value: int
    bound: float
    rank_LE: NDArray[np.int64]


@dataclass(frozen=True)
class Gap:
    """How far a placement is from the best possible: (bound - value) / bound. proved: bound is the optimum."""

    value: int
    bound: float
    gap: float
    proved: bool


def relative_gap(value: float, bound: float) -> float:
    return (bound - value) / bound if bound > 0 else 0.0


def solve(program: Program, rng: np.random.Generator, starts: int = 8, time_limit_s: float = 60.0) -> Solved:
    """The optimum of a program of few experts; UserError where there are too many placements to enumerate."""
    until = search_s() + time_limit_s
    layers, _, experts = program.counts_LUE.shape
    labelled = placements(experts, program.ranks, layers > 1)
    canonical = placements(experts, program.ranks, False)
    if layers > 1:  # canonical placements first: layer 0 needs no others
        key = experts ** np.arange(experts)[::-1]
        rest = labelled[~np.isin(labelled.astype(np.int64) @ key, canonical.astype(np.int64) @ key)]
        labelled = np.concatenate([canonical, rest])
    combinations = len(canonical) * len(labelled) ** (layers - 1)
    if combinations > 3e7:
        raise UserError(
            f"{layers} layers of {experts} experts on {program.ranks} ranks have {combinations:.1e} placements: too many "
            "to prove an optimum; use `semantic` and the bound of placement/lagrangian.py"
        )
    one_hot_NEG = (labelled[:, :, None] == np.arange(program.ranks)).astype(np.float32)
    score_LNUG = np.einsum("lue,neg->lnug", program.counts_LUE.astype(np.float32), one_hot_NEG)
    score_LNUG = np.rint(score_LNUG).astype(np.int32)
    value, rank_LE = program.alternate(starts, rng)
    weight_U = program.weight_U
    best, best_L, kept_KL, bound_K, seen = survivors(
        score_LNUG, len(canonical), weight_U, program.capacity, value, program.equal_weights, 40, KEEP
    )
    if program.equal_weights:
        if best > value:
            value, rank_LE = int(best), labelled[best_L].astype(np.int64)
        return Solved(value, float(value), rank_LE)
    if seen > KEEP:
        raise UserError(f"{seen} placements survive the bound, more than {KEEP}: too many to prove an optimum")
    bound = float(value)
    for k in np.argsort(-bound_K, kind="stable"):
        if bound_K[k] < value + 1 - 1e-6:
            break
        if search_s() > until:
            bound = max(bound, float(np.floor(bound_K[k] + 1e-6)))
            warnings.warn(
                f"exact: time limit of {time_limit_s:g} s, gap {relative_gap(value, bound):.2%}", stacklevel=2
            )
            break
        candidate = labelled[kept_KL[k]].astype(np.int64)
        found, at_most, _ = best_homes(program.scores_UG(candidate), weight_U, program.capacity)
        bound = max(bound, at_most)
        if found > value:
            value, rank_LE = found, candidate
    return Solved(value, max(bound, float(value)), rank_LE)


def gap(placement: Placement, problem: PlacementProblem, home_cap: float = 1.10, proof: bool = True) -> Gap:
    """How far `placement`, with the best homes for it, is from the optimum of the 0-1 program of `problem`.

    proof: enumerate where the case is small enough; otherwise, or where it is too large, the Lagrangian bound.
    """
    value, bound, proved = 0, 0.0, True
    programs = programs_of(problem, home_cap)
    for program, found in zip(programs, values_of(placement, programs), strict=True):
        value += found
        try:
            if not proof:
                raise UserError("a bound is wanted, no proof")
            solved = solve(program, problem.rng(), time_limit_s=problem.time_limit_s)
            bound, proved = bound + solved.bound, proved and solved.bound == solved.value
        except UserError:
            bound, proved = bound + upper_bound(program, problem.time_limit_s, found).bound, False
    return Gap(value, bound, relative_gap(value, bound), proved)


def values_of(placement: Placement, programs: list[Program]) -> list[int]:
    """Assignments served at home under the best homes for `placement`, in each of the programs of its problem."""
    rank_LE = ranks_of(placement)
    phantoms = ((0, 0), (0, programs[0].experts - rank_LE.shape[1]))
    wide_LE = np.pad(rank_LE, phantoms, constant_values=placement.ep_size)  # on no rank: they have no assignments
    per_program = np.split(wide_LE, len(programs))
    return [program.homes(rows)[0] for program, rows in zip(programs, per_program, strict=True)]


if __name__ == "__main__":
    from .gap_report import main

    main()
