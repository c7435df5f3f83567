"""No straw men: every baseline beats `random` on its own objective, on every trace at hand.

That each is within 1 % of the enumerated optimum of that objective is shown in its own test file, but for `eplb`, whose
output is the published algorithm's, whatever its distance (test_placement_policies.py): `load_balanced` stands for balance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED_DATA
from numpy.typing import NDArray
from placement_problems import problem

import semmoe
from semmoe.config import compose_all
from semmoe.placement.base import Placement, PlacementPolicy, PlacementProblem
from semmoe.placement.partition import kept
from semmoe.placement.random import Random
from semmoe.placement.sem_moe_sampler import answered
from semmoe.plugins import instantiate
from semmoe.sources.fingerprints import load_fingerprints
from semmoe.trace import RoutingTrace

TINY = Path(semmoe.__file__).parent / "assets" / "traces" / "tiny_docs.npz"
GPT_OSS = SHARED_DATA / "traces" / "gptoss20b_mmlu_decode_routes.npz"
LAYERS = 4  # of a trace: enough to tell, quick to place


def ranks_of(placement: Placement) -> NDArray[np.int64]:
    return placement.first_slot_LE.astype(np.int64) // placement.slots_per_rank


def peak_load(placement: Placement, given: PlacementProblem) -> float:
    """max / mean rows a rank: what `eplb` and `load_balanced` level."""
    load_LG = np.einsum("le,leg->lg", given.profile.load_LE, placement.rank_mask_LEG)
    return float((load_LG.max(axis=1) / load_LG.mean(axis=1)).mean())


def spread(placement: Placement, given: PlacementProblem) -> float:
    """Sum of |load - mean|: the first program of `moetuner`."""
    load_LG = np.einsum("le,leg->lg", given.profile.load_LE, placement.rank_mask_LEG)
    return float(np.abs(load_LG - load_LG.mean(axis=1, keepdims=True)).sum())


def separated(placement: Placement, given: PlacementProblem) -> float:
    """Co-activated pairs on different ranks: `occult`, `grace`."""
    apart = 0.0
    for layer, rank_E in enumerate(ranks_of(placement)):
        weight_EE = given.profile.coactivation_EE(layer).astype(np.float64)
        np.fill_diagonal(weight_EE, 0.0)
        apart += weight_EE.sum() / 2 - kept(weight_EE, rank_E)
    return apart


def changes(placement: Placement, given: PlacementProblem) -> float:
    """Rank changes between consecutive layers: `exflow`."""
    rank_LE, moved = ranks_of(placement), 0.0
    for layer in range(1, len(rank_LE)):
        flow_EE = given.profile.transitions_EE(layer)
        moved += float(flow_EE[rank_LE[layer - 1][:, None] != rank_LE[layer][None]].sum())
    return moved


def program(placement: Placement, given: PlacementProblem) -> float:
    """The paper's 0-1 program over requests, theta .5: the `sem_moe` family."""
    mass_LRE = np.stack([given.profile.request_counts_RE(layer) for layer in range(given.profile.num_layers)])
    share_R = given.profile.trace.length_R / given.profile.trace.num_tokens
    mass = mass_LRE / mass_LRE.sum()
    return float(answered(mass, share_R, ranks_of(placement)[None], placement.ep_size, 0.5)[0][0])


OBJECTIVES: dict[str, Callable[[Placement, PlacementProblem], float]] = {
    "eplb": peak_load,
    "load_balanced": peak_load,
    "moetuner": spread,
    "occult": separated,
    "grace": separated,
    "exflow": changes,
    "sem_moe": program,
    "sem_moe_sampler": program,
}


def policy(option: str) -> PlacementPolicy:
    (config,) = compose_all([f"placement={option}"])
    made: PlacementPolicy = instantiate({k: v for k, v in config["placement"].items() if k != "slots"}, "placement")
    return made


def shortened(path: Path) -> RoutingTrace:
    """Its first layers and requests."""
    whole = (load_fingerprints(path) if path == GPT_OSS else RoutingTrace.load(path)).select(np.arange(24))
    fields = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    cut = {
        "experts_TLk": whole.experts_TLk[:, :LAYERS],
        "layer_ids_L": whole.layer_ids_L[:LAYERS],
        "gate_weight_TLk": None,
    }
    return RoutingTrace(**(fields | {name: value for name, value in cut.items() if name in fields}))


@pytest.mark.parametrize("path", [TINY, GPT_OSS], ids=["tiny", "gpt-oss"])
@pytest.mark.parametrize("option", OBJECTIVES)
def test_every_baseline_beats_random_on_its_own_objective(option: str, path: Path) -> None:
    if not path.is_file():
        pytest.skip(f"{path.name} lies outside the repository")
    given = problem(shortened(path), 4, home="request", time_limit_s=5.0)
    ours = OBJECTIVES[option](policy(option).place(given), given)
    chance = [
        OBJECTIVES[option](Random().place(problem(given.profile.trace, 4, home="request", seed=seed)), given)
        for seed in range(5)
    ]
    assert ours < min(chance)
