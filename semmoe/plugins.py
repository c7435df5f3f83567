"""Instantiate what a config names by `_target_`: the one way to extend semmoe."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from .errors import UserError, nearest
from .kinds import check_kinds


def add_working_directory() -> None:
    """Put the working directory on the import path, so that a policy in a file beside the user works as it is."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


METHODS = {  # that a policy must have
    "placement": ("place",),
    "predictor": ("scores", "fit"),
    "replica_router": ("slots",),
    "request_scheduler": ("assign",),
    "token_scheduler": ("homes",),
}
ARGUMENTS: dict[
    str, dict[str, tuple[str, ...]]
] = {  # of each method that a policy may have, in the order in which it gets them
    "placement": {"place": ("problem",)},
    "predictor": {"scores": ("token_ids_T", "layer", "history", "placement"), "fit": ("profile",)},
    "replica_router": {"slots": ("experts_Tk", "homes_T", "placement", "layer")},
    "request_scheduler": {
        "assign": ("request", "score_G", "head_counts", "ranks"),
        "assign_window": ("requests", "score_RG", "head_counts", "ranks"),
        "fit": ("profile", "placement"),
    },
    "token_scheduler": {"homes": ("score_TG", "capacity")},
}


def instantiate(group: dict[str, Any], where: str) -> Any:
    """The object that a config group describes; None for a group without `_target_`.

    UserError names the group, the target and what failed: module not found or broken, class not in it, a parameter
    that it does not take or of another kind, no method that the group's protocol needs.
    """
    target = group.get("_target_")
    if target is None:
        if where in ("placement", "request_scheduler", "replica_router"):
            raise UserError(f"{where}._target_ names no class; module.Class is right, such as my_policy.Mine")
        return None
    from hydra.errors import HydraException
    from hydra.utils import instantiate as hydra_instantiate

    made_by = _locate(str(target), where)
    check_kinds(made_by, group, f"{where}.")
    try:
        made = hydra_instantiate(group, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        given = ", ".join(k for k in group if k != "_target_") or "none"
        raise UserError(
            f"{where}._target_={target}: {' '.join(str(cause).split()) or type(cause).__name__}; "
            f"parameters that it takes are needed (given here: {given})"
        ) from error
    for name in METHODS.get(where, ()):
        if not callable(getattr(made, name, None)):
            raise UserError(
                f"{where}._target_={target}: has no method {name}(), which every {where} needs (docs/plugins.md)"
            )
    for name, arguments in ARGUMENTS.get(where, {}).items():
        _check_call(getattr(made, name, None), arguments, f"{where}._target_={target}")
    return made


def _check_call(method: Any, arguments: Sequence[str], said: str) -> None:
    """UserError where a method cannot take the arguments that it will get. None, and what hides its parameters, passes."""
    try:
        parameters = inspect.signature(method)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(*arguments)
    except TypeError as error:
        right = f"{method.__name__}(self, {', '.join(arguments)})"
        raise UserError(f"{said}: {method.__name__}{parameters} is called as {right}: {error}") from None


def _locate(target: str, where: str) -> Callable[..., Any]:
    """The class or function that a dotted name means; UserError says which part of it is wrong."""
    module_name, _, name = target.rpartition(".")
    said = f"{where}._target_={target}"
    if not module_name or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(f"{said}: module.Class is right, such as my_policy.Mine")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{said}: no module '{error.name}' in the working directory ({os.getcwd()}) or among the installed packages"
            ) from None
        raise UserError(f"{said}: the module needs '{error.name}', which is not installed") from None
    except Exception as error:
        raise UserError(f"{said}: {place_of(error)}the module cannot be imported: {told(error)}") from error
    found = getattr(module, name, None)
    if found is None:
        own = [word for word, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise UserError(f"{said}: {module_name} ({module.__file__}) has no '{name}'{nearest(name, own) if own else ''}")
    if not callable(found):
        raise UserError(f"{said}: is a {type(found).__name__}; a class with the protocol's methods is needed")
    return cast(Callable[..., Any], found)


def told(error: BaseException) -> str:
    """Kind and text of an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def place_of(error: BaseException) -> str:
    """`FILE:LINE: ` of the innermost frame in a file of the working directory that is not semmoe's own; "" for none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    own = Path(__file__).resolve().parent.parent
    ours = [own / name for name in ("semmoe", "simulator", "harness")]
    found, seen = "", set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # simpy raises a copy whose cause holds the frames
        seen.add(id(cause))
        for frame, line in traceback.walk_tb(cause.__traceback__):
            file = Path(frame.f_code.co_filename)
            users = file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts and file.is_file()
            if users and not any(file.resolve().is_relative_to(path) for path in ours):
                found = f"{file}:{line}: in {frame.f_code.co_name}: "
        cause = cause.__cause__ or cause.__context__
    return found
