"""Run: one configuration made concrete for either backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch_form import BatchForm
from .decisions import Traced
from .dispatch import DispatchSpec
from .heads import Heads
from .planning import StepPlanner
from .recipe import Fitted, Recipe
from .rows import commit, label
from .serving import Known, Request, ServingLimits, ServingLoop
from .serving.workload import Workload, batches
from .settings import settings_digest
from .specs import ClusterSpec, ModelSpec, digest
from .trace import RoutingTrace
from .traffic.locality import LocalityMeter

LIMITS = tuple(f.name for f in fields(ServingLimits))


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
    pools: tuple[Run, Run] | None = None  # prefill and decode ranks of a disaggregated service

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
        return self.recipe.ep_size if self.pools is None else sum(pool.ep_size for pool in self.pools)

    @property
    def planned_by(self) -> tuple[str, ...]:
        """Labels of what plans the homes of every layer: token scheduler and predictor; none where the flow gives them.

        A scheduler that sees the routes asks no predictor."""
        if self.spec.flow != "tp_shuffled":
            return ()
        scheduler = self.recipe.make_token_scheduler()
        alone = self.fitted.predictor is None or getattr(scheduler, "sees_routes", False)
        groups = ("token_scheduler",) if alone else ("token_scheduler", "predictor")
        return tuple(label(self.cfg[group]) for group in groups)

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
        """Rank of every held-out request in a batches workload of flow dp, after its head where one is measured."""
        if self.spec.flow != "dp":
            return None
        return self.recipe.request_ranks(self.fitted, self.heldout, self.head_tokens)

    @property
    def head_tokens(self) -> int:
        """Tokens that a request runs before it is re-homed (batches, dp); 0: it is not."""
        return int(self.cfg["workload"].get("head_tokens") or 0)

    @cached_property
    def heads(self) -> Heads | None:
        """Where the tokens of a batches workload of flow dp run; None in other flows."""
        if self.request_rank_R is None:
            return None
        return Heads(self.heldout, self.request_rank_R, self.ep_size, self.head_tokens)

    @property
    def home_T(self) -> NDArray[np.int64] | None:
        """Rank of every held-out token in flow dp: heads where round robin put the request, the rest where it went."""
        return None if self.heads is None else self.heads.home_T

    @property
    def kv_moves_M3(self) -> NDArray[np.int64]:
        """(source rank, destination rank, tokens) of every request whose head's KV cache moves when it is re-homed."""
        return np.zeros((0, 3), dtype=np.int64) if self.heads is None else self.heads.kv_moves_M3

    @property
    def batch_form(self) -> BatchForm:
        """Sequences of the batches of a batches workload."""
        return BatchForm.of(self.cfg["workload"])

    def batch_steps(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64] | None]]:
        """(rows of the held-out trace, home rank of each row or None) of every batch of a batches workload."""
        work = self.cfg["workload"]
        seed = int(self.cfg["seed"])
        for rows_T in batches(self.heldout, work["batch_tokens"], work["composition"], work["max_batches"], seed):
            yield rows_T, None if self.home_T is None else self.home_T[rows_T]

    @cached_property
    def workload(self) -> Workload:
        """The requests of a serve workload."""
        block_tokens = int(self.cfg["serving"]["prefix_block_tokens"])
        return Workload.of(self.heldout, self.cfg["workload"], int(self.cfg["seed"]), block_tokens)

    def serving_loop(self, prompts_only: bool = False) -> ServingLoop:
        """A fresh loop over the workload: one queue a rank in dp, one for all ranks in attention-TP.

        prompts_only: the prefill pool of a disaggregated service, which makes the first token and holds the KV.
        """
        limits = ServingLimits(**{name: self.cfg["serving"][name] for name in LIMITS})
        requests = self.workload.requests
        if prompts_only:
            requests = [replace(request, output_len=1) for request in requests]
        if self.spec.flow != "dp":
            return ServingLoop(requests, 1, limits, hold_kv=prompts_only)
        scheduler = self.recipe.request_scheduler(self.fitted)

        seen: Any = scheduler
        if self.cfg.get("decisions"):
            folder = Path(self.cfg["results_dir"]) / self.name / "decisions"
            seen = Traced(scheduler, folder / f"{self.config_id}.jsonl")
        return ServingLoop(
            requests,
            self.ep_size,
            limits,
            seen if self.ep_size > 1 else None,
            *self.knowledge(self.fitted, scheduler),
            hold_kv=prompts_only,
        )

    def knowledge(self, fitted: Fitted, scheduler: Any) -> tuple[Known, Known]:
        """(score_G, measured counts_LE) of a served request, as functions for a loop: what `fitted` knows of it."""

        def known_of(request: Request) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
            source = int(self.workload.source_R[request.id])
            return self.recipe.known_of(fitted, scheduler, self.heldout, source)

        return lambda request: known_of(request)[0], lambda request: known_of(request)[1]

    def meter(self) -> LocalityMeter:
        return LocalityMeter(self.heldout.num_layers, self.ep_size, self.recipe.wiring)

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
