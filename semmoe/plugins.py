"""Instantiate what a config names by `_target_`: the one way to extend semmoe."""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import UserError


def add_working_directory() -> None:
    """Put the working directory on the import path, so that a policy in a file beside the user works as it is."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def instantiate(group: dict[str, Any], where: str) -> Any:
    """The object that a config group describes; None for a group without `_target_`.

    UserError names the group, the target and what failed (module not found, class not in it, unknown parameter).
    """
    target = group.get("_target_")
    if not target:
        return None
    from hydra.errors import HydraException
    from hydra.utils import instantiate as hydra_instantiate

    try:
        return hydra_instantiate(group, _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise UserError(
            f"{where}._target_={target}: {first}; a class with the protocol's methods, importable from the working "
            "directory or an installed package, and parameters that it takes are needed (given here: "
            f"{', '.join(k for k in group if k != '_target_') or 'none'})"
        ) from error
