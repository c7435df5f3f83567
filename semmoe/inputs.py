"""Load what a config names: the cluster (or its calibration) and the trace, checked against the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from .config import conf_dir
from .errors import UserError, nearest
from .plugins import instantiate
from .specs import ClusterSpec, ModelSpec
from .trace import RoutingTrace

ASSETS = Path(__file__).parent / "assets"


def load_cluster(group: dict[str, Any]) -> tuple[dict[str, Any], ClusterSpec]:
    """(content, ClusterSpec) of a config group. A `file` (a calibration) replaces the group's own values.

    Only the file that cluster=local names by itself may be missing: its guesses stand until `semmoe calibrate` was run.
    UserError for any other missing file, one that holds no cluster, and values set beside a file that says otherwise.
    """
    raw = dict(group)
    file = raw.pop("file", None)
    if not file or _is_awaited(file):
        return raw, ClusterSpec.from_dict(raw)
    if not Path(file).is_file():
        raise UserError(_missing(file, raw.get("name")))
    content = _read_cluster(file)
    _refuse_values_beside(raw, content, file)
    return content, ClusterSpec.from_dict(content)


def warn_uncalibrated(groups: Iterable[dict[str, Any]]) -> None:
    """Say on stderr, once, where times will come from the guesses of cluster=local. groups: the cluster groups of configs."""
    for file in dict.fromkeys(group.get("file") for group in groups):
        if file and _is_awaited(file):
            print(
                f"semmoe: warning: {file} does not exist: times come from cluster=local's uncalibrated guesses; run "
                "`semmoe calibrate` (cluster.file=null takes them without a word)",
                file=sys.stderr,
            )


@cache
def _guesses() -> dict[str, Any]:
    """conf/cluster/local.yaml: the one group that names a file by itself."""
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "cluster/local.yaml"))
    return {str(key): value for key, value in raw.items()}


def _is_awaited(file: str) -> bool:
    """Whether this is the file that cluster=local names and that nobody has written yet."""
    return file == _guesses()["file"] and not Path(file).exists()


def _missing(file: str, name: Any) -> str:
    path = Path(file)
    if path.is_dir():
        return f"cluster.file={file} is a folder; the cluster file in it is right"
    there = [str(other) for other in path.parent.glob("*.yaml")]
    return (
        f"cluster.file={file}: no such file{nearest(str(path), there) if there else ''}; `semmoe calibrate "
        f"cluster.file={file}` makes it, cluster.file=null takes the values of cluster={name} itself"
    )


def _read_cluster(file: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:
        raise UserError(f"{file}: not a readable cluster file ({error}); run `semmoe calibrate` again") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{file}: not a cluster file; run `semmoe calibrate` again")
    return {str(key): value for key, value in loaded.items()}


def _refuse_values_beside(raw: dict[str, Any], content: dict[str, Any], file: str) -> None:
    """UserError for cluster.KEY=VALUE of cluster=local where the calibration holds another value, which would win."""
    if raw.get("name") != _guesses()["name"]:
        return
    for key, value in raw.items():
        if value != _guesses().get(key) and content.get(key) != value:
            raise UserError(
                f"cluster.{key}={value} has no effect: {file} holds {content.get(key)}; calibrate again with it, name "
                "another cluster.file, or set cluster.file=null for the values of cluster=local itself"
            )


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
