"""RunBuilder: makes Runs from resolved configs; what configurations have in common is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from .config import POLICY_GROUPS
from .dispatch import DispatchSpec
from .errors import UserError
from .inputs import check_trace, load_cluster, load_trace
from .placement.base import Placement
from .plan_store import PlanStore, is_ours
from .plugins import instantiate
from .profile import Profile
from .recipe import Fitted, Recipe
from .run import Run
from .serving.workload import workload_axes
from .specs import ClusterSpec, ModelSpec, digest
from .trace import RoutingTrace


class RunBuilder:
    """Makes Runs from resolved configs; traces, splits, fits and planned figures are shared between configurations.

    plans: where placements and planned figures are kept from one session to the next (default: nowhere).
    """

    def __init__(self, plans: PlanStore | None = None) -> None:
        self.plans = plans or PlanStore()
        self._cache: dict[str, Any] = {}

    def build(self, cfg: dict[str, Any]) -> Run:
        """The Run of one config; UserError for anything in it that cannot work."""
        prefill = int(cfg["serving"]["prefill_ranks"])
        for key in ("prefill_ranks", "two_batch_overlap") if cfg["workload"]["kind"] != "serve" else ():
            if cfg["serving"][key]:
                raise UserError(
                    f"serving.{key}={cfg['serving'][key]} needs requests: set workload=serve or workload=log"
                )
        return self._disaggregated(cfg, prefill) if prefill else self._build(cfg)

    def _disaggregated(self, cfg: dict[str, Any], prefill: int) -> Run:
        """A Run of two pools, each with the placement and policies of its own number of ranks."""
        cluster = load_cluster(cfg["cluster"])[1]
        ranks, inner = int(cfg["ep_size"] or cluster.ranks), cluster.ranks_per_node
        if prefill >= ranks:
            raise UserError(f"serving.prefill_ranks={prefill} of {ranks} ranks leaves none to decode; fewer are right")
        if cfg["replacement"]["every_steps"]:
            raise UserError(f"serving.prefill_ranks={prefill} does not go with replacement.every_steps; set one to 0")
        if ranks > inner and prefill % inner:  # a pool's exchanges are priced from the start of a node on
            raise UserError(
                f"serving.prefill_ranks={prefill} of {ranks} ranks divides a node of {inner}; a multiple of {inner} is right"
            )
        if cfg["flow"]["name"] != "dp":
            raise UserError(f"serving.prefill_ranks={prefill} needs flow=dp, where a rank holds whole requests")
        alone = cfg | {"planned_folds": 0, "serving": cfg["serving"] | {"prefill_ranks": 0}}
        first, second = (self._build(alone | {"ep_size": size}) for size in (prefill, ranks - prefill))
        axes = second.axes | {"ep_size": ranks, "serving": serving_axes(cfg)}
        return replace(second, cfg=cfg | {"dtype": second.cfg["dtype"]}, axes=axes, pools=(first, second))

    def _build(self, cfg: dict[str, Any]) -> Run:
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
        parted = [cfg["trace"], cfg["train_fraction"], cfg["split"], cfg["seed"]]
        train, heldout = self._cached(
            "split", parted, lambda: trace.split(float(cfg["train_fraction"]), int(cfg["seed"]), str(cfg["split"]))
        )
        profile = self._cached("profile", parted, lambda: Profile.fit(train))
        predictor = self._cached("predictor", [parted, cfg["predictor"]], lambda: recipe.fit_predictor(profile))
        key = [trace.digest, *_fit_key(cfg, ep_size, recipe)]
        store = self.plans if is_ours(cfg["placement"], cfg["predictor"]) else PlanStore()
        fitted = self._cached(
            "fit",
            key,
            lambda: Fitted(profile, predictor, store.placement(key, lambda: recipe.place(profile, predictor))),
        )
        planned = self._planned(cfg, recipe, train, key)
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

    def _planned(
        self, cfg: dict[str, Any], recipe: Recipe, train: RoutingTrace, fit_key: list[Any]
    ) -> dict[str, float]:
        folds = int(cfg["planned_folds"])
        if folds < 2:
            return {}
        work = cfg["workload"]
        batch_tokens, composition = int(work.get("batch_tokens") or 512), str(work.get("composition") or "shuffled")
        request = recipe.home == "request"
        homes = cfg["request_scheduler"] if request else [recipe.spec.flow, cfg["token_scheduler"], cfg["home_cap"]]
        router = cfg["replica_router"] if recipe.slots > recipe.model.num_experts else None
        key = [fit_key, folds, batch_tokens, composition, cfg["dispatcher"], cfg["dtype"], homes, router]
        store = self.plans if is_ours(*(cfg[group] for group in POLICY_GROUPS)) else PlanStore()

        def place(part: int, profile: Profile, predictor: Any) -> Placement:  # schedulers share the placement of a fold
            made: Placement = self._cached("fold", [fit_key, folds, part], lambda: recipe.place(profile, predictor))
            return made

        figures: dict[str, float] = self._cached(
            "planned",
            key,
            lambda: store.figures(key, lambda: recipe.planned(train, batch_tokens, composition, folds, place)),
        )
        return figures

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
        shuffled = cfg["flow"]["name"] == "tp_shuffled"
        spec = DispatchSpec(
            flow=cfg["flow"]["name"],
            dispatcher=dispatcher["name"],
            hidden=model.hidden,
            top_k=model.top_k,
            activation_dtype=cfg["dtype"],
            dispatch_dtype=dispatcher.get("dispatch_dtype"),
            combine_dtype=dispatcher.get("combine_dtype"),
            carry_expert_ids=shuffled and getattr(make["predictor"](), "lookback", 0) > 0,
            keeps_order=shuffled and bool(getattr(make["token_scheduler"](), "keeps_order", False)),
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
        cfg["split"],
        cfg["seed"],
        cfg["model"],
        cfg["placement"],
        cfg["predictor"],
        ep_size,
        recipe.home,
        cfg["time_limit_s"],
        _tiers(cfg, recipe.cluster),
    ]


def _tiers(cfg: dict[str, Any], cluster: ClusterSpec) -> Any:
    """What a placement may depend on in a cluster: our own look at its link tiers alone, anybody else's at all of it."""
    if not str(cfg["placement"].get("_target_")).startswith("semmoe."):
        return cluster.digest
    return [cluster.ranks_per_node, cluster.link_gbps / cluster.nic_gbps if cluster.nodes > 1 else 1.0]


def _axes(
    cfg: dict[str, Any], model: ModelSpec, cluster: ClusterSpec, trace: RoutingTrace, ep_size: int, recipe: Recipe
) -> dict[str, Any]:
    """All that makes the configuration what it is, and nothing that only one backend knows (DESIGN section 7)."""
    spec, flow = recipe.spec, recipe.spec.flow
    work = workload_axes(cfg["workload"])
    if flow != "dp" or not work.get("head_tokens"):
        work.pop("head_tokens", None)
    if cfg["scope"] != "full_model":
        work = {key: value for key, value in work.items() if key not in ("form", "context_tokens")}
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
        "workload": work,
        "scope": cfg["scope"],
    }
    if cfg["routing"] != "traced":
        axes["routing"] = cfg["routing"]
    if cfg["split"] != "random":
        axes["split"] = cfg["split"]
    if cfg["replacement"]["every_steps"]:
        axes["replacement"] = cfg["replacement"]
    if cfg["model_scale"] != 1:
        axes["model_scale"] = cfg["model_scale"]
    if recipe.slots > model.num_experts:
        axes["replica_router"] = cfg["replica_router"]
    if flow == "dp":
        axes["request_scheduler"] = cfg["request_scheduler"]
    if flow == "tp_shuffled":
        axes |= {"token_scheduler": cfg["token_scheduler"], "home_cap": cfg["home_cap"]}
    if cfg["workload"]["kind"] == "serve":
        axes["serving"] = serving_axes(cfg)
    return axes


def serving_axes(cfg: dict[str, Any]) -> dict[str, Any]:
    """The serving keys that can change anything: a prefix cache needs requests that declare a prefix."""
    axes, work = dict(cfg["serving"]), cfg["workload"]
    if work["log"] is None and not work["prefix_groups"]:
        del axes["prefix_block_tokens"]
    for key in ("prefill_ranks", "two_batch_overlap"):
        if not axes[key]:
            del axes[key]
    return axes
