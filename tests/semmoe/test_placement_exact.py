"""The proved optimum and the upper bounds, against brute force that shares no code with them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from placement_problems import problem

from semmoe.errors import UserError
from semmoe.placement.contiguous import Contiguous
from semmoe.placement.enumeration import placements, price_bound
from semmoe.placement.exact import Exact, gap, solve
from semmoe.placement.gap_report import Kept
from semmoe.placement.instances import problem_of, request_instance, token_instance
from semmoe.placement.lagrangian import best_sets, column_bound, row_bound, spectral_bound, upper_bound
from semmoe.placement.program import Program, programs_of
from semmoe.placement.semantic import Semantic
from semmoe.sources.fingerprints import load_fingerprints
from semmoe.sources.synthetic import Synthetic

ROUTES = Path("../shared/data/traces/gptoss20b_mmlu_decode_routes.npz")
TRACE = Synthetic(requests=6, prompt_len=12, output_len=0, num_experts=6, top_k=2, layers=2, groups=3, topics=3).make()


def random_program(seed: int, layers: int = 1, items: int = 6, experts: int = 6, ranks: int = 3, equal: bool = True):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.gamma(0.5, 8.0, (layers, items, experts)))
    weight = np.full(items, 3) if equal else rng.integers(1, 9, items)
    capacity = max(int(1.2 * weight.sum() / ranks), -(-items // ranks) * int(weight.min()), int(weight.max()) + 2)
    return Program(counts.astype(np.int64), weight.astype(np.int64), ranks, capacity)


def brute_force(program: Program) -> int:
    """Best value over every labelled placement of every layer and every assignment of homes."""
    layers, items, experts = program.counts_LUE.shape
    size = experts // program.ranks
    ways = [
        w
        for w in itertools.product(range(program.ranks), repeat=experts)
        if all(w.count(g) == size for g in range(program.ranks))
    ]
    homes = np.array(list(itertools.product(range(program.ranks), repeat=items)))
    loads = np.stack([(homes == g) @ program.weight_U for g in range(program.ranks)], axis=1)
    homes = homes[(loads <= program.capacity).all(axis=1)]
    best = 0
    for combination in itertools.product(ways, repeat=layers):
        score = np.zeros((items, program.ranks), dtype=np.int64)
        for layer, way in enumerate(combination):
            for e, g in enumerate(way):
                score[:, g] += program.counts_LUE[layer, :, e]
        best = max(best, int(score[np.arange(items), homes].sum(axis=1).max()))
    return best


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_equals_brute_force(seed: int) -> None:
    for equal in (True, False):
        program = random_program(seed, equal=equal)
        solved = solve(program, np.random.default_rng(0), starts=1)
        assert solved.value == solved.bound == brute_force(program)
        value, _, _ = program.homes(solved.rank_LE)
        assert value == solved.value


@pytest.mark.parametrize("seed", range(4))
def test_homes_shared_by_two_layers_too(seed: int) -> None:
    program = random_program(seed, layers=2, items=5, experts=4, ranks=2, equal=seed % 2 == 0)
    assert solve(program, np.random.default_rng(0), starts=1).value == brute_force(program)


@pytest.mark.parametrize("seed", range(12))
def test_every_upper_bound_is_one_and_the_column_bound_is_close(seed: int) -> None:
    program = random_program(seed, equal=seed % 3 > 0)
    optimum = brute_force(program)
    column, _ = column_bound(program.counts_LUE[0], program, 60.0)
    assert min(column, spectral_bound(program), row_bound(program)) >= optimum - 1e-6
    if program.equal_weights:  # few unequal items fill a home in part: there the bound is wide
        assert column <= 1.1 * optimum
    assert column <= row_bound(program) + 1e-6
    assert upper_bound(program).bound >= optimum


def test_bounds_of_layers_with_shared_homes_hold() -> None:
    program = random_program(3, layers=2, items=6, experts=4, ranks=2)
    optimum = brute_force(program)
    assert spectral_bound(program) >= optimum <= row_bound(program)
    assert upper_bound(program, 5.0).bound >= optimum


def test_a_planted_optimum_is_found_and_bounded_exactly() -> None:
    counts = np.kron(np.eye(4, dtype=np.int64), np.full((3, 2), 5))[None]  # 12 items, 8 experts, 4 blocks
    program = Program(counts[:, :, [0, 2, 4, 6, 1, 3, 5, 7]], np.ones(12, np.int64), 4, 3)
    assert solve(program, np.random.default_rng(0), starts=1).value == program.total == upper_bound(program).bound


def test_best_sets_by_hand() -> None:
    counts = np.array([[5.0, 4.0, 0.0], [0.0, 3.0, 3.0], [1.0, 0.0, 2.0]])
    net, taken, member = best_sets(counts, np.zeros(3), np.array([1.0, 1.0, 1.0]), np.ones(3), 2, 2.0)
    # {0, 1}: items 9, 3, 1 less 1 each = 8 + 2 + 0; two fit
    assert net[0] == 10 and member[0].tolist() == [1, 1, 0] and taken[0].tolist() == [1, 1, 0]
    # {1, 2}: items 4, 6, 2 less 1 = 3 + 5 + 1; two fit
    assert net[1] == 8 and taken[1].tolist() == [1, 1, 0]
    assert net[2] == -np.inf  # expert 2 starts no pair


def test_placements_are_all_and_distinct() -> None:
    assert len(placements(6, 3, True)) == 90 and len(placements(6, 3, False)) == 15
    assert len(np.unique(placements(8, 4, True), axis=0)) == 2520
    with pytest.raises(UserError, match="too many to prove an optimum"):
        placements(32, 4, False)


def test_price_bound_is_never_below_the_best_homes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        program = random_program(int(rng.integers(1 << 30)))
        score = program.scores_UG(rng.permutation(np.arange(6) % 3)[None])
        value, _, _ = program.homes(rng.permutation(np.arange(6) % 3)[None])
        bound = price_bound(score, program.weight_U, program.capacity, 0, 40, np.zeros(3))
        loose = price_bound(score, program.weight_U, 10**6, 0, 40, np.zeros(3))
        assert bound <= loose == score.max(axis=1).sum()
        homes = np.array(list(itertools.product(range(3), repeat=6)))
        loads = np.stack([(homes == g) @ program.weight_U for g in range(3)], axis=1)
        homes = homes[(loads <= program.capacity).all(axis=1)]
        assert bound >= score[np.arange(6), homes].sum(axis=1).max() - 1e-6
        assert value <= row_bound(program)


@pytest.mark.parametrize("home", ["token", "request"])
def test_the_policy_is_at_least_as_good_as_any_other(home: str) -> None:
    given = problem(TRACE, 3, home=home)
    placed = Exact().place(given)
    assert placed.notes["gap"] == 0
    mine = gap(placed, given)
    assert mine.proved and mine.gap == 0 and mine.value == placed.notes["value"]
    other = gap(Contiguous().place(given), given)
    assert other.value < mine.value and other.gap == pytest.approx(1 - other.value / mine.value)
    assert gap(Contiguous().place(given), given, proof=False).bound >= mine.value


def test_token_programs_weigh_types_by_their_count() -> None:
    programs = programs_of(problem(TRACE, 3))
    assert len(programs) == 2
    assert programs[0].weight_U.sum() == TRACE.num_tokens and programs[0].total == 2 * TRACE.num_tokens


def test_what_cannot_be_solved_is_said() -> None:
    with pytest.raises(UserError, match="no replicas"):
        Exact().place(problem(TRACE, 3, slots=9))
    big = Synthetic(requests=4, prompt_len=8, output_len=0, num_experts=32, top_k=2, layers=1).make()
    with pytest.raises(UserError, match="too many to prove an optimum"):
        Exact().place(problem(big, 4, home="request"))
    assert not gap(Contiguous().place(problem(big, 8)), problem(big, 8, time_limit_s=1.0)).proved
    with pytest.raises(UserError, match="must be at least 1"):
        Exact(home_cap=0.5)


@pytest.mark.skipif(not ROUTES.is_file(), reason="the real routes lie outside the repository")
def test_semantic_is_near_the_proved_optimum_of_real_instances() -> None:
    trace, gaps = load_fingerprints(ROUTES), []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        part = request_instance(trace, 8, 16, 1, rng) if seed % 2 else token_instance(trace, 8, 24, rng)
        given = problem_of(part, 4, "request")
        found = gap(Semantic(load_weight=0.0, restarts=64).place(given), given)
        assert found.proved
        gaps.append(found.gap)
        assert gap(Contiguous().place(given), given).gap > 0.02
    assert np.mean(gaps) <= 0.002 and max(gaps) <= 0.01


def test_a_report_goes_on_behind_its_last_whole_case(tmp_path) -> None:
    path, made = tmp_path / "kept.jsonl", []
    for text in ("", '["third", [3'):  # the second run was stopped within a line
        with open(path, "a") as file:
            file.write(text)
        kept = Kept(path, {"routes": "a"})
        figures = [
            kept.figure(name, lambda name=name: made.append(name) or [len(name)]) for name in ("first", "second")
        ]
        assert figures == [[5], [6]]
    assert made == ["first", "second"]
    assert Kept(path, {"routes": "b"}).figures == {}, "figures of other routes are no figures of these"
