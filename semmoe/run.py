"""Run: one configuration made concrete for either backend. RunBuilder makes runs and shares what they can share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decisions import Traced
from .dispatch import DispatchSpec
from .errors import UserError
from .inputs import check_trace, load_cluster, load_trace
from .locality import LocalityMeter
from .planning import StepPlanner
from .plugins import instantiate
from .recipe import Fitted, Recipe
from .rows import commit, label
from .serving import Request, ServingLimits, ServingLoop
from .settings import settings_digest
from .specs import ClusterSpec, ModelSpec, digest
from .trace import RoutingTrace
from .workload import Workload, batches

POLICY_GROUPS = ("placement", "predictor", "request_scheduler", "token_scheduler", "replica_router")


@dataclass(frozen=True, eq=False)
class Run:
    """A configuration with its data: what simulator and harness get. `cfg` is the resolved config as plain dict."""

    cfg: dict[str, Any]
    recipe: Recipe
    fitted: Fitted
    train: RoutingTrace
    heldout: RoutingTrace
    planned: dict[str, float]
    axes: dict[str, Any]
    repeat: int = 0
    cluster_raw: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.cfg["name"])

    @property
    def config_id(self) -> str:
        return digest(self.axes)

    @property
    def model(self) -> ModelSpec:
        return self.recipe.model

    @property
    def cluster(self) -> ClusterSpec:
        return self.recipe.cluster

    @property
    def spec(self) -> DispatchSpec:
        return self.recipe.spec

    @property
    def ep_size(self) -> int:
        return self.recipe.ep_size

    @property
    def scope(self) -> str:
        return str(self.cfg["scope"])

    @property
    def kind(self) -> str:
        """Workload kind: "batches" (fixed batches) or "serve" (requests through the ServingLoop)."""
        return str(self.cfg["workload"]["kind"])

    def planner(self) -> StepPlanner:
        """A fresh planner over the held-out trace."""
        return self.recipe.planner(self.fitted, self.heldout)

    @cached_property
    def request_rank_R(self) -> NDArray[np.int64] | None:
        """Rank of every held-out request in a batches workload of flow dp."""
        return self.recipe.request_ranks(self.fitted, self.heldout) if self.spec.flow == "dp" else None

    def batch_steps(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """(rows of the held-out trace, home rank of each row or None) of every batch of a batches workload."""
        work = self.cfg["workload"]
        seed = int(self.cfg["seed"])
        for rows_T in batches(self.heldout, work["batch_tokens"], work["composition"], work["max_batches"], seed):
            ranks = self.request_rank_R
            yield rows_T, None if ranks is None else ranks[self.heldout.request_T[rows_T]]

    @cached_property
    def workload(self) -> Workload:
        """The requests of a serve workload."""
        work = self.cfg["workload"]
        return Workload.sample(
            self.heldout,
            work["num_requests"],
            work["arrivals"],
            work["rate_rps"],
            work["max_prompt"],
            work["max_output"],
            int(self.cfg["seed"]),
        )

    def serving_loop(self) -> ServingLoop:
        """A fresh loop over the workload: one queue a rank in dp, one for all ranks in attention-TP."""
        limits = ServingLimits(**self.cfg["serving"])
        if self.spec.flow != "dp":
            return ServingLoop(self.workload.requests, 1, limits)
        scheduler = self.recipe.request_scheduler(self.fitted)

        def known_of(request: Request) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
            source = int(self.workload.source_R[request.id])
            return self.recipe.known_of(self.fitted, scheduler, self.heldout, source)

        seen: Any = scheduler
        if self.cfg.get("decisions"):
            folder = Path(self.cfg["results_dir"]) / self.name / "decisions"
            seen = Traced(scheduler, folder / f"{self.config_id}.jsonl")
        return ServingLoop(
            self.workload.requests,
            self.ep_size,
            limits,
            seen if self.ep_size > 1 else None,
            lambda request: known_of(request)[0],
            lambda request: known_of(request)[1],
        )

    def meter(self) -> LocalityMeter:
        return LocalityMeter(self.heldout.num_layers, self.ep_size, self.cluster.ranks_per_node)

    def identity(self, backend: str, transport: str, kernel_path: str) -> dict[str, Any]:
        """Identity, configuration and planned columns of this run's row; the backend adds the rest."""
        cfg, spec = self.cfg, self.spec
        dp, shuffled, serve = spec.flow == "dp", spec.flow == "tp_shuffled", self.kind == "serve"
        return {
            "config_id": self.config_id,
            "backend": backend,
            "run": self.name,
            "transport": transport,
            "kernel_path": kernel_path,
            "commit": commit(),
            "seed": cfg["seed"],
            "repeat": self.repeat,
            "cluster": self.cluster.name,
            "cluster_digest": self.cluster.digest,
            "settings_digest": settings_digest(cfg, backend, self.config_id, self.repeat),
            "model": self.model.name,
            "trace": Path(self.heldout.path).name,
            "trace_digest": self.axes["trace_digest"],
            "flow": spec.flow,
            "dispatcher": spec.dispatcher or "none",
            "ep_size": self.ep_size,
            "slots": self.recipe.slots,
            "placement": label(cfg["placement"]),
            "predictor": label(cfg["predictor"]),
            "replica_router": label(cfg["replica_router"]) if self.fitted.placement.has_replicas else "-",
            "request_scheduler": label(cfg["request_scheduler"]) if dp else "-",
            "token_scheduler": label(cfg["token_scheduler"]) if shuffled else "-",
            "home_cap": self.recipe.home_cap if shuffled else None,
            "workload": self.kind,
            "rate_rps": cfg["workload"].get("rate_rps") if serve else None,
            "batch_tokens": None if serve else cfg["workload"]["batch_tokens"],
            "dtype": spec.activation_dtype,
            "scope": self.scope,
            "axes": json.dumps(self.axes, sort_keys=True),
            **{f"{key}_planned": value for key, value in self.planned.items()},
        }


class RunBuilder:
    """Makes Runs from resolved configs; traces, splits, fits and planned figures are shared between configurations."""

    def __init__(self) -> None:
        self._cache: dict[str, Any] = {}

    def build(self, cfg: dict[str, Any]) -> Run:
        """The Run of one config; UserError for anything in it that cannot work."""
        model: ModelSpec = instantiate(cfg["model"], "model").scaled(float(cfg["model_scale"]))
        cluster_raw, cluster = load_cluster(cfg["cluster"])
        trace: RoutingTrace = self._cached("trace", cfg["trace"], lambda: load_trace(cfg["trace"]))
        check_trace(trace, model)
        ep_size = int(cfg["ep_size"] or cluster.ranks)
        if ep_size > cluster.ranks:
            raise UserError(f"ep_size={ep_size} on cluster {cluster.name}, which has only {cluster.ranks} ranks")
        if cfg["scope"] not in ("moe_layers", "full_model"):
            raise UserError(f"scope='{cfg['scope']}' must be moe_layers or full_model")
        cfg = cfg | {"dtype": cfg["dtype"] or ("fp32" if cluster.cores else "bf16")}
        recipe = self._recipe(cfg, model, cluster, ep_size)
        train, heldout = self._cached(
            "split",
            [cfg["trace"], cfg["train_fraction"], cfg["seed"]],
            lambda: trace.split(float(cfg["train_fraction"]), int(cfg["seed"])),
        )
        key = _fit_key(cfg, ep_size, recipe)
        fitted = self._cached("fit", key, lambda: recipe.fit(train))
        work = cfg["workload"]
        batch_tokens = int(work.get("batch_tokens") or 512)
        composition = str(work.get("composition") or "shuffled")
        folds = int(cfg["planned_folds"])
        planned = self._cached(
            "planned",
            [key, folds, batch_tokens, composition, cfg["dispatcher"], cfg["dtype"]]
            + [cfg["request_scheduler"] if recipe.home == "request" else [cfg["token_scheduler"], cfg["home_cap"]]],
            lambda: recipe.planned(train, batch_tokens, composition, folds) if folds > 1 else {},
        )
        return Run(
            cfg,
            recipe,
            fitted,
            train,
            heldout,
            planned,
            _axes(cfg, model, cluster, trace, ep_size, recipe),
            cluster_raw=cluster_raw,
        )

    def repeats(self, cfg: dict[str, Any]) -> list[Run]:
        """The same run `cfg.repeats` times under increasing repeat numbers."""
        run = self.build(cfg)
        return [replace(run, repeat=r) for r in range(int(cfg["repeats"]))]

    def _cached(self, kind: str, key: Any, make: Callable[[], Any]) -> Any:
        name = f"{kind}-{digest(key)}"
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def _recipe(self, cfg: dict[str, Any], model: ModelSpec, cluster: ClusterSpec, ep_size: int) -> Recipe:
        dispatcher = cfg["dispatcher"]
        make = {group: _maker(cfg[group], group) for group in POLICY_GROUPS}
        spec = DispatchSpec(
            flow=cfg["flow"]["name"],
            dispatcher=dispatcher["name"],
            hidden=model.hidden,
            top_k=model.top_k,
            activation_dtype=cfg["dtype"],
            dispatch_dtype=dispatcher.get("dispatch_dtype"),
            combine_dtype=dispatcher.get("combine_dtype"),
            carry_expert_ids=cfg["flow"]["name"] == "tp_shuffled" and getattr(make["predictor"](), "lookback", 0) > 0,
        )
        slots = int(cfg["placement"].get("slots") or model.num_experts)
        return Recipe(
            model=model,
            cluster=cluster,
            spec=spec,
            ep_size=ep_size,
            slots=slots,
            make_placement=make["placement"],
            make_predictor=make["predictor"],
            make_request_scheduler=make["request_scheduler"],
            make_token_scheduler=make["token_scheduler"],
            make_replica_router=make["replica_router"],
            home_cap=float(cfg["home_cap"]),
            seed=int(cfg["seed"]),
            time_limit_s=float(cfg["time_limit_s"]),
        )


def _maker(group: dict[str, Any], where: str) -> Callable[[], Any]:
    """Makes the policy of a config group; picklable, because rank processes get the Run."""
    return partial(instantiate, {key: value for key, value in group.items() if key != "slots"}, where)


def _fit_key(cfg: dict[str, Any], ep_size: int, recipe: Recipe) -> list[Any]:
    return [
        cfg["trace"],
        cfg["train_fraction"],
        cfg["seed"],
        cfg["model"],
        cfg["placement"],
        cfg["predictor"],
        ep_size,
        recipe.home,
        recipe.spec.flow,
        cfg["cluster"].get("name"),
    ]


def _axes(
    cfg: dict[str, Any], model: ModelSpec, cluster: ClusterSpec, trace: RoutingTrace, ep_size: int, recipe: Recipe
) -> dict[str, Any]:
    """All that makes the configuration what it is, and nothing that only one backend knows (DESIGN section 7)."""
    spec, flow = recipe.spec, recipe.spec.flow
    axes = {
        "model": model.name,
        "cluster": cluster.name,
        "trace_digest": trace.digest,
        "seed": cfg["seed"],
        "train_fraction": cfg["train_fraction"],
        "ep_size": ep_size,
        "flow": flow,
        "dispatcher": spec.dispatcher,
        "activation_dtype": spec.activation_dtype,
        "dispatch_dtype": spec.dispatch_dtype,
        "combine_dtype": spec.combine_dtype,
        "placement": cfg["placement"],
        "predictor": cfg["predictor"],
        "workload": cfg["workload"],
        "scope": cfg["scope"],
    }
    if cfg["model_scale"] != 1:
        axes["model_scale"] = cfg["model_scale"]
    if recipe.slots > model.num_experts:
        axes["replica_router"] = cfg["replica_router"]
    if flow == "dp":
        axes["request_scheduler"] = cfg["request_scheduler"]
    if flow == "tp_shuffled":
        axes |= {"token_scheduler": cfg["token_scheduler"], "home_cap": cfg["home_cap"]}
    if cfg["workload"]["kind"] == "serve":
        axes["serving"] = cfg["serving"]
    return axes
