"""Load what a config names: the cluster (or its calibration) and the trace, checked against the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import UserError
from .plugins import instantiate
from .specs import ClusterSpec, ModelSpec
from .trace import RoutingTrace

ASSETS = Path(__file__).parent / "assets"


def load_cluster(raw: dict[str, Any]) -> tuple[dict[str, Any], ClusterSpec]:
    """The ClusterSpec of a config group. A `file` that exists (a calibration) replaces the group's own values."""
    raw = dict(raw)
    file = raw.pop("file", None)
    if file and Path(file).is_file():
        from omegaconf import OmegaConf

        try:
            loaded: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
        except Exception as error:
            raise UserError(f"{file}: not a readable cluster file ({error}); run `semmoe calibrate` again") from None
        if not isinstance(loaded, dict):
            raise UserError(f"{file}: not a cluster file; run `semmoe calibrate` again")
        raw = {str(k): v for k, v in loaded.items()}
    return raw, ClusterSpec.from_dict(raw)


def load_trace(group: dict[str, Any]) -> RoutingTrace:
    """The trace of a config group: `path` (a leading "asset:" means one shipped with semmoe) or a `_target_`."""
    if group.get("_target_"):
        made = instantiate(group, "trace")
        return made if isinstance(made, RoutingTrace) else made.make()
    if "path" not in group:
        raise UserError(
            "trace.path is missing; trace=file trace.path=FILE.npz is right, or another trace= (semmoe trace)"
        )
    path = str(group["path"])
    return RoutingTrace.load(ASSETS / path.removeprefix("asset:") if path.startswith("asset:") else path)


def check_trace(trace: RoutingTrace, model: ModelSpec) -> None:
    """UserError when the trace was recorded on a model other than the config's."""
    shape = (trace.num_experts, trace.top_k, trace.num_layers)
    if shape != (model.num_experts, model.top_k, model.num_moe_layers) or trace.model != model.name:
        raise UserError(
            f"{trace.path}: recorded on {trace.model} ({shape[0]} experts, top-{shape[1]}, {shape[2]} MoE layers), but "
            f"model={model.name} has {model.num_experts} experts, top-{model.top_k}, {model.num_moe_layers} MoE layers;"
            " set model= or trace= so that they agree"
        )
