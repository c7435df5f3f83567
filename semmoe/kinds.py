"""Kinds: whether the values that a config gives to a class fit the annotations of its parameters."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from .errors import UserError

WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a word"}


def check_kinds(target: Callable[..., Any], values: Mapping[str, Any], where: str) -> None:
    """UserError naming the first value that is not of the int, float, bool or str that `target` declares for it.

    Parameters with another annotation, or none, are left to the class itself. where: prefix of the key in the message.
    """
    hints = _hints(target)
    for name, value in values.items():
        kinds, optional = _simple(hints.get(name))
        if kinds and not (value is None and optional) and not any(is_kind(value, kind) for kind in kinds):
            right = " or ".join([WORDS[kind] for kind in kinds] + ["null"] * optional)
            raise UserError(f"{where}{name}={value} must be {right}")


def is_kind(value: Any, kind: type) -> bool:
    """Whether a value is of this kind: whole numbers count as float, true and false as neither number."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _simple(hint: Any) -> tuple[list[type], bool]:
    """(the simple kinds of an annotation, whether None is one); no kinds where anything else is allowed too."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    named = [part for part in parts if part is not types.NoneType]
    return ([], False) if any(part not in WORDS for part in named) else (named, len(named) < len(parts))


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Annotations by parameter; none where they cannot be resolved (names that only a type checker imports)."""
    try:
        return typing.get_type_hints(getattr(target, "__init__", None) if isinstance(target, type) else target)
    except Exception:
        return {}
