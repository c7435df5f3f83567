"""Break-even map: time that locality saves, by LAR and batch size, on one cluster after the other.

    semmoe breakeven [clusters=h100x8,l40sx8] [out=results/runs/NAME/breakeven] [key=value ...]

No trace and no policy: what a policy would have to reach. One MoE layer of the configured model, flow and dispatcher is
priced for traffic that is alike on all ranks (`even_traffic`), with a share LAR of the assignments at home and the rest
spread over the other ranks, choice by choice. It is held against the better baseline at the same batch: the flow's
without co-scheduling (LAR 1 / ranks, by chance), and `allgather_rs` in attention-DP or the two all-reduces in
attention-TP. A policy that also packs a token's remote experts onto fewer ranks, or that loads ranks less evenly, is
better or worse than its point on the map. Below about 1 MiB a measured curve wavers by some microseconds, so less than
WORTH_PCT is not told apart from nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semmoe.config import compose_one
from semmoe.dispatch import DispatchSpec
from semmoe.errors import UserError
from semmoe.files import write_atomically
from semmoe.inputs import load_cluster, warn_uncalibrated
from semmoe.plugins import instantiate
from semmoe.specs import ClusterSpec, ModelSpec
from semmoe.traffic import Traffic, with_collectives

from .cost.model import CostModel
from .layer import time_layers

TOKENS = tuple(2**i for i in range(0, 14))  # a rank and batch
LARS = 41  # from chance to 1
WORTH_PCT = 5.0  # time saved that counts as paying


@dataclass(frozen=True)
class BreakEven:
    """The map of one cluster. gain_pct[i][j]: time saved at lar[i] and tokens_per_rank[j]; None: cannot be priced.

    baseline and baseline_ms: name and layer time of the better baseline at each batch size. least_lar: the LAR from which
    on at least WORTH_PCT is saved at each batch size; None where not even LAR 1 does."""

    cluster: str
    ep_size: int
    tokens_per_rank: list[int]
    lar: list[float]
    gain_pct: list[list[float | None]]
    baseline: list[str]
    baseline_ms: list[float | None]
    least_lar: list[float | None]
    provenance: str


def even_traffic(model: ModelSpec, spec: DispatchSpec, ranks: int, tokens_per_rank: int, lar: float) -> Traffic:
    """Expected traffic of one layer in which all ranks are alike; real-valued rows.

    Each of a token's k choices is at home with probability `lar`, else on each other rank alike, so that a rank serves
    any of them with 1 - (1 - p)^k, and of its E/G experts a share 1 - (1 - 1/n)^rows has a row. tp_replicated: no homes.
    """
    rows, experts = tokens_per_rank * spec.top_k, model.num_experts / ranks
    share_GG = np.full((ranks, ranks), (1 - lar) / max(ranks - 1, 1))
    np.fill_diagonal(share_GG, lar if ranks > 1 else 1.0)
    # Traffic's arrays count whole rows; expected ones are fractions, and the cost model prices them alike
    homes_LG: Any = np.full((1, ranks), tokens_per_rank)
    pairs_LGG: Any = (rows * share_GG)[None]
    distinct_LGG: Any = (tokens_per_rank * (1 - (1 - share_GG) ** spec.top_k))[None]
    rows_LG: Any = np.full((1, ranks), float(rows))
    active_LG: Any = np.full((1, ranks), experts * (1 - (1 - 1 / max(experts, 1.0)) ** rows))
    if spec.flow == "tp_replicated":
        homes_LG, pairs_LGG, distinct_LGG = homes_LG * 0, pairs_LGG * 0, distinct_LGG * 0
    traffic = Traffic(homes_LG, pairs_LGG, distinct_LGG, rows_LG, active_LG, tokens=tokens_per_rank * ranks)
    return with_collectives(traffic, spec)


def break_even(
    model: ModelSpec,
    cluster: ClusterSpec,
    spec: DispatchSpec,
    ranks: int,
    tokens_per_rank: Sequence[int] = TOKENS,
    allow_roofline: bool = False,
) -> BreakEven:
    """The map of one cluster. UserError where nothing of it can be priced."""
    lar_I = np.linspace(1 / ranks, 1.0, LARS) if ranks > 1 else np.ones(1)
    cost = CostModel(model, cluster, spec, ranks, None, allow_roofline)
    rivals = {name: CostModel(model, cluster, s, ranks, None, allow_roofline) for name, s in baselines(spec).items()}
    names, base_ms, gains_JI = [], [], []
    for tokens in tokens_per_rank:
        priced = {name: _layer_ms(rival, tokens, 1 / ranks) for name, rival in rivals.items()}
        best = min(priced, key=lambda name: priced[name])
        names.append(best)
        base_ms.append(priced[best])
        gains_JI.append([100 * (1 - _layer_ms(cost, tokens, lar) / priced[best]) for lar in lar_I])
    gain_IJ = np.array(gains_JI).T
    if np.isnan(gain_IJ).all():
        _layer_ms(cost, tokens_per_rank[0], lar_I[0], strict=True)
        raise UserError(f"cluster {cluster.name}: no batch size can be priced for its baselines")
    least = [_from_on(lar_I, gain_IJ[:, j]) for j in range(len(tokens_per_rank))]
    return BreakEven(cluster.name, ranks, list(tokens_per_rank), lar_I.tolist(), _plain(gain_IJ), names,
                     _plain(np.array(base_ms)), least, cost.provenance())  # fmt: skip


def baselines(spec: DispatchSpec) -> dict[str, DispatchSpec]:
    """The honest baselines of a flow and dispatcher, by name."""
    if spec.flow == "dp":
        named = {f"dp {name}": replace(spec, dispatcher=name, dispatch_dtype=None) for name in ("allgather_rs",)}
        return {f"dp {spec.dispatcher}": spec} | named
    replicated = replace(spec, flow="tp_replicated", dispatcher=None, dispatch_dtype=None, carry_expert_ids=False)
    if spec.flow == "tp_replicated":
        raise UserError("flow=tp_replicated has no homes, so no locality; use dp, tp_scattered or tp_shuffled")
    scattered = replace(spec, flow="tp_scattered", carry_expert_ids=False)
    return {f"tp_scattered {spec.dispatcher}": scattered, "tp_replicated": replicated}


def _layer_ms(cost: CostModel, tokens_per_rank: int, lar: float, strict: bool = False) -> float:
    """Milliseconds of one layer; NaN where the cluster has no figures for it (UserError if `strict`)."""
    try:
        times = time_layers(cost, even_traffic(cost.model, cost.spec, cost.ep_size, tokens_per_rank, lar))
    except UserError:
        if strict:
            raise
        return float("nan")
    return float(times.layer_ms_L[0])


def _from_on(lar_I: NDArray[np.float64], gain_I: NDArray[np.float64]) -> float | None:
    """The LAR from which on the gain stays at WORTH_PCT or above, interpolated; None where it never does."""
    below = np.flatnonzero(~(gain_I >= WORTH_PCT))
    if not len(below):
        return float(lar_I[0])
    i = int(below[-1])
    if i == len(lar_I) - 1 or np.isnan(gain_I[i]):
        return None
    return float(np.interp(WORTH_PCT, gain_I[i : i + 2], lar_I[i : i + 2]))


def _plain(values: NDArray[np.float64]) -> Any:
    return [_plain(row) for row in values] if values.ndim > 1 else [None if np.isnan(v) else float(v) for v in values]


def main(argv: Sequence[str]) -> int:
    """Price the maps, write breakeven.json and a page with the figure, and print the break-even LAR."""
    from .breakeven_page import terminal, write_page

    own = {"out", "clusters"}
    given = dict(word.split("=", 1) for word in argv if word.split("=", 1)[0] in own and "=" in word)
    overrides = [word for word in argv if word.split("=", 1)[0] not in own]
    chosen = [f"cluster={name}" for name in given.get("clusters", "").split(",") if name] or [""]
    maps: list[BreakEven] = []
    for cluster_override in chosen:
        config = compose_one([*overrides, *([cluster_override] if cluster_override else []), "planned_folds=0"])
        model: ModelSpec = instantiate(config["model"], "model").scaled(float(config["model_scale"]))
        _, cluster = load_cluster(config["cluster"])
        warn_uncalibrated([config["cluster"]])
        ranks = int(config["ep_size"] or cluster.ranks)
        if not 2 <= ranks <= cluster.ranks:
            raise UserError(f"ep_size={ranks} on cluster {cluster.name}: 2 to {cluster.ranks} ranks are right")
        dispatcher = config["dispatcher"]
        spec = DispatchSpec(
            flow=config["flow"]["name"], dispatcher=dispatcher["name"], hidden=model.hidden, top_k=model.top_k,
            activation_dtype=config["dtype"] or ("fp32" if cluster.cores else "bf16"),
            dispatch_dtype=dispatcher.get("dispatch_dtype"), combine_dtype=dispatcher.get("combine_dtype"),
        )  # fmt: skip
        maps.append(break_even(model, cluster, spec, ranks, allow_roofline=bool(config["cost"]["allow_roofline"])))
    folder = Path(given.get("out") or Path(config["results_dir"]) / str(config["name"]) / "breakeven")
    about = f"model {model.name}, flow {spec.flow}, dispatcher {spec.dispatcher}, {spec.activation_dtype}"
    write_atomically(folder / "breakeven.json", json.dumps({"about": about, "maps": [asdict(m) for m in maps]}))
    write_page(folder / "breakeven.html", maps, about, "semmoe breakeven " + " ".join(argv))
    print(terminal(maps, about))
    print(f"report: {folder / 'breakeven.html'}")
    return 0
