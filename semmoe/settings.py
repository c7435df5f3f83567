"""What a row depends on beside its configuration: settings of the backend, sources of plug-ins, a replayed log.

`config_id` joins predicted and measured rows, so it may hold nothing that only one backend knows. A row that exists
is kept only where this digest agrees as well.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from .axes import flat
from .plugins import METHODS
from .serving.steplog import step_log_path
from .specs import digest

# in config_id or cluster_digest already, or without influence on a row
ELSEWHERE = {"model", "model_scale", "cluster", "trace", "flow", "dispatcher", "workload", "serving", "seed", "ep_size"}
ELSEWHERE |= {"train_fraction", "split", "replacement", "home_cap", "dtype", "scope", "routing", "transport", *METHODS}
ELSEWHERE |= {"name", "results_dir", "rerun", "replay", "repeats", "sweep", "experiment", "workers"}
OTHER_BACKEND = {"simulator": "measure", "harness": "cost"}


def settings_digest(cfg: dict[str, Any], backend: str, config_id: str, repeat: int) -> str:
    """Digest of everything that can change a row of this backend and is not in its config id or cluster file."""
    used = _used(cfg, backend)
    if "measure" in used:
        used["measure"] = {key: value for key, value in used["measure"].items() if key != "timeout_s"}
    if cfg["workload"]["kind"] != "serve":
        used.pop("slo", None)
    kernels = cfg["transport"].get("kernels", "torch")
    if backend == "harness" and kernels != "torch":
        used["kernels"] = kernels
    sources = {group: _source(cfg.get(group)) for group in (*METHODS, "trace")}
    used["sources"] = {group: source for group, source in sources.items() if source}
    if cfg.get("replay"):
        used["replayed"] = _content(step_log_path(cfg["replay"], config_id, repeat))
    return digest(used)


def differing_settings(one: dict[str, Any], other: dict[str, Any], backend: str) -> list[str]:
    """Dotted names of what differs, is outside config_id and not in a row's file name: ["cluster.link_gbps"]."""
    seen = [flat(_used(cfg, backend) | {"cluster": cfg["cluster"]}) for cfg in (one, other)]
    return sorted(key for key in seen[0].keys() | seen[1].keys() if seen[0].get(key) != seen[1].get(key))


def _used(cfg: dict[str, Any], backend: str) -> dict[str, Any]:
    return {key: value for key, value in cfg.items() if key not in ELSEWHERE and key != OTHER_BACKEND.get(backend)}


def _source(group: Any) -> str | None:
    """Digest of the file that a plug-in's class lies in; None for what semmoe brings along."""
    target = str((group or {}).get("_target_") or "")
    if not target or target.startswith("semmoe."):
        return None
    spec = importlib.util.find_spec(target.rpartition(".")[0])
    return _content(Path(spec.origin)) if spec and spec.origin else None


def _content(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None
