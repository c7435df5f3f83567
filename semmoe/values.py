"""What every scalar key of the config may hold. Checked on composing, so that no backend meets a word for a number.

Parameters of classes (`model`, `cluster`, policies) are checked against their annotations instead: see kinds.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from .errors import UserError, nearest
from .kinds import WORDS, is_kind
from .serving.arrivals import PROCESSES
from .specs import DTYPE_BYTES

Rule = tuple[str, Callable[[Any], bool]]  # what is right, and whether a value is
BIG = 1 << 53  # whole numbers above it lose digits in the JSON of a row

FLAG: Rule = ("true or false", lambda value: is_kind(value, bool))
POSITIVE: Rule = ("a number above 0", lambda value: is_kind(value, float) and value > 0)
TEXT: Rule = ("a word or path", lambda value: is_kind(value, str) and bool(value.strip()) and "\0" not in value)


def whole(low: int) -> Rule:
    """A whole number of at least `low`."""
    return f"a whole number of at least {low}", lambda value: is_kind(value, int) and low <= value <= BIG


def among(*words: str) -> Rule:
    return f"one of {', '.join(words)}", lambda value: value in words


def or_null(rule: Rule) -> Rule:
    return f"{rule[0]}, or null", lambda value: value is None or rule[1](value)


def _is_folder_name(value: Any) -> bool:
    path = PurePath(str(value))
    inside = not path.is_absolute() and ".." not in path.parts and path.parts != ()
    return isinstance(value, str | int | float) and not isinstance(value, bool) and inside and "\0" not in str(value)


RULES: dict[str, Rule] = {
    "name": ("the name of a folder inside results_dir", _is_folder_name),
    "results_dir": TEXT,
    "seed": whole(0),
    "model_scale": ("a number in (0, 1]", lambda value: is_kind(value, float) and 0 < value <= 1),
    "ep_size": or_null(whole(1)),
    "train_fraction": ("a number strictly between 0 and 1", lambda value: is_kind(value, float) and 0 < value < 1),
    "split": among("random", "time"),
    "replacement.every_steps": whole(0),
    "replacement.overlap": ("a number in 0..1", lambda value: is_kind(value, float) and 0 <= value <= 1),
    "home_cap": ("a number of at least 1", lambda value: is_kind(value, float) and value >= 1),
    "dtype": or_null(among(*DTYPE_BYTES)),
    "scope": among("moe_layers", "full_model"),
    "planned_folds": ("0 or a whole number of at least 2", lambda value: is_kind(value, int) and 0 <= value != 1),
    "time_limit_s": POSITIVE,
    "routing": among("traced", "expected"),
    "repeats": whole(1),
    "workers": whole(1),
    "rerun": FLAG,
    "replay": or_null(TEXT),
    "serving.max_batch_tokens": whole(1),
    "serving.max_running": whole(1),
    "serving.kv_tokens": whole(1),
    "serving.prefix_block_tokens": whole(0),
    "serving.prefill_ranks": whole(0),
    "cost.allow_roofline": FLAG,
    "cost.cuda_graphs": among("all", "decode", "none"),
    "cost.fidelity": among("bottleneck", "flow"),
    "slo.ttft_ms": POSITIVE,
    "slo.tpot_ms": POSITIVE,
    "slo.e2e_ms": or_null(POSITIVE),
    "measure.feed": among("hidden", "random", "checkpoint"),
    "measure.checkpoint": or_null(TEXT),
    "measure.cuda_graph": among("auto", "on", "off"),
    "measure.warmup": whole(0),
    "measure.plan": among("host", "device"),
    "measure.timeout_s": (
        "a number above 0, at most 604800 (a week)",
        lambda value: is_kind(value, float) and 0 < value <= 604800,
    ),
    "measure.flush_mb": (
        "a whole number of megabytes from 0 (warm caches) to 4096, a few times the last cache",
        lambda value: is_kind(value, int) and 0 <= value <= 4096,
    ),
    "workload.kind": among("batches", "serve"),
    "workload.batch_tokens": whole(1),
    "workload.head_tokens": whole(0),
    "workload.composition": among("shuffled", "sequential"),
    "workload.max_batches": or_null(whole(1)),
    "workload.form": among("prefill", "decode"),
    "workload.context_tokens": whole(1),
    "workload.num_requests": or_null(whole(1)),
    "workload.arrivals": among(*PROCESSES),
    "workload.rate_rps": or_null(POSITIVE),
    "workload.arrival_cv": ("a number of at least 0", lambda value: is_kind(value, float) and value >= 0),
    "workload.burst_s": POSITIVE,
    "workload.pause_s": ("a number of at least 0", lambda value: is_kind(value, float) and value >= 0),
    "workload.log": or_null(TEXT),
    "workload.prefix_groups": whole(0),
    "workload.prefix_tokens": whole(1),
    "workload.max_prompt": or_null(whole(1)),
    "workload.max_output": or_null(whole(1)),
    "trace.path": TEXT,
    "model.path": TEXT,
    "cluster.file": or_null(TEXT),
    "placement.slots": or_null(whole(1)),
    "transport.name": among("collective", "shared", "symmetric", "virtual"),
    "transport.kernels": among("torch", "triton"),
}

ON_OFF = (
    "measure.cuda_graph",
)  # keys with the words on and off, which a YAML file holds as true and false unless quoted


def as_numbers(value: Any) -> Any:
    """The config with whole numbers too long for 64 bits as floats, which is what they would be with an exponent."""
    if isinstance(value, dict):
        return {key: as_numbers(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [as_numbers(inside) for inside in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return float(f"{value:.0e}") if abs(value) < 10**400 else float("inf")
    return value


def as_words(config: dict[str, Any]) -> None:
    """Put the words back where a file left them unquoted: of the keys ON_OFF, true means on and false off."""
    for key in ON_OFF:
        group, _, name = key.rpartition(".")
        inside = config.get(group)
        if isinstance(inside, dict) and isinstance(value := inside.get(name), bool):
            inside[name] = "on" if value else "off"


def check_values(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """UserError naming the first key of a resolved config whose value is not what its rule asks for.

    defaults: the tree of config.yaml; a key of it without a rule keeps the kind of its default value.
    """
    for key, (right, holds) in (_kinds_of(defaults) | RULES).items():
        group, _, name = key.rpartition(".")
        inside = config.get(group) if group else config
        if not isinstance(inside, Mapping):
            raise UserError(f"{group}={inside} must be a group of keys such as {key}")
        if name in inside and not holds(value := inside[name]):
            words = right.removeprefix("one of ").removesuffix(", or null").split(", ")
            close = nearest(value, words) if right.startswith("one of ") and isinstance(value, str) else ""
            close = close if "did you mean" in close else ""
            raise UserError(f"{key}={'null' if value is None else value} must be {right}{close}")


def _kinds_of(defaults: Mapping[str, Any], prefix: str = "") -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            rules |= _kinds_of(default, f"{prefix}{name}.")
        elif isinstance(default, bool | int | float | str):
            kind = type(default)
            rules[f"{prefix}{name}"] = WORDS[kind], partial(is_kind, kind=kind)
    return rules
