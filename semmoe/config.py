"""Compose configurations with Hydra: overrides, `-m` sweeps, experiments with a `sweep`, plug-ins.

Hydra's compose API is used instead of its launcher, so that one command sees all configurations of a sweep at once:
one pool of rank processes, one progress bar, and rows that exist already are not made again.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bars import progress
from .errors import UserError, nearest
from .plugins import METHODS
from .values import as_numbers, as_words, check_values


def conf_dir() -> Path:
    """The directory of the config tree: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UserError(f"{here}: the config tree conf/ is missing from this installation; install semmoe again")


def group_options(group: str) -> list[str]:
    """Names that a config group offers."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def compose_all(overrides: Sequence[str], multirun: bool = False) -> list[dict[str, Any]]:
    """One resolved config per point of the sweep, in order.

    A comma in an override sweeps over its values (needs -m); an experiment's `sweep` list adds products of its own,
    in which a key that the command line sets keeps the command line's value.
    """
    from hydra import initialize_config_dir

    _register_resolvers()
    products = _expand(overrides, multirun)
    configs = []
    with (
        initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"),
        progress(len(products), "composing", "config") as bar,  # some 8 a second
    ):
        for point in products:
            base = _compose(point)
            swept = sweep_points(base.get("sweep") or [], point)
            bar.total += len(swept) - 1
            for extra in swept:
                configs.append(_compose([*point, *extra]) if extra else base)
                bar.update()
    defaults = _defaults()
    for position, composed in enumerate(configs):
        configs[position] = config = as_numbers(composed)
        config.pop("sweep", None)
        config.pop("experiment", None)
        as_words(config)
        check_values(config, defaults)
    return configs


def compose_one(overrides: Sequence[str]) -> dict[str, Any]:
    """The one resolved config that these overrides describe; UserError where an experiment sweeps over several."""
    configs = compose_all(overrides)
    if len(configs) != 1:
        raise UserError(
            f"the overrides describe {len(configs)} configurations (an experiment with a sweep?); one is right"
        )
    return configs[0]


def _defaults() -> dict[str, Any]:
    """The tree of config.yaml without its defaults list and sweep."""
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / "config.yaml"))
    return {str(key): value for key, value in tree.items() if key not in ("defaults", "sweep")}


def _register_resolvers() -> None:
    """${shape:FIELD} of the config's model, ${count:LIST} and ${first:LIST}, for groups that take sizes from it."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("shape", _model_field, replace=True)
    OmegaConf.register_new_resolver("count", len, replace=True)
    OmegaConf.register_new_resolver("first", lambda items: items[0], replace=True)


def _model_field(name: str, *, _root_: Any) -> Any:
    """A field of the ModelSpec that the config's model makes: known only then where a Hugging Face file describes it."""
    from omegaconf import OmegaConf

    from .plugins import instantiate

    model: Any = OmegaConf.to_container(_root_.model, resolve=True, throw_on_missing=True)
    field = model.get(name)
    if field is None:
        field = getattr(instantiate(model, "model"), name)
    return list(field) if isinstance(field, tuple) else field


def _expand(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise UserError(f"override not understood: {str(error).splitlines()[0]}; key=value is right") from None
    axes = []
    for override in parsed:
        if not override.is_sweep_override():
            axes.append([override.input_line or ""])
        elif not multirun:
            raise UserError(
                f"'{override.input_line}' names several values: one is right (simulate and measure: -m sweeps)"
            )
        else:
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return [list(point) for point in itertools.product(*axes)]


def sweep_points(sweep: Any, fixed: Sequence[str]) -> list[list[str]]:
    """Overrides of each point of an experiment's `sweep`; keys that `fixed` sets keep their value."""
    if not isinstance(sweep, list) or not all(isinstance(block, dict) for block in sweep):
        raise UserError("sweep must be a list of mappings such as [{placement: [contiguous, semantic]}]")
    set_keys = {override.split("=", 1)[0].lstrip("+~") for override in fixed}
    points = []
    for block in sweep:
        axes = []
        for key, values in block.items():
            values = values if isinstance(values, list) else [values]
            axes.append([] if key in set_keys else [f"{key}={_written(value)}" for value in values])
        points += [list(point) for point in itertools.product(*(axis for axis in axes if axis))]
    unique = list(dict.fromkeys(tuple(point) for point in points))
    return [list(point) for point in unique] or [[]]


def _written(value: Any) -> Any:
    """A value of a YAML file as an override writes it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else value


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_nameless_groups_and_gaps(overrides)
    try:
        config = compose("config", overrides=list(overrides))
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise (_own(error) or UserError(_explain(str(error), overrides))) from None
    assert isinstance(resolved, dict)
    if gone := sorted(set(groups()) - {"experiment"} - set(resolved)):
        raise UserError(f"{gone[0]} is left out; {gone[0]}=NAME is right ({', '.join(group_options(gone[0]))})")
    return {str(key): value for key, value in resolved.items()}


def _refuse_nameless_groups_and_gaps(overrides: Sequence[str]) -> None:
    """UserError for `token_scheduler=null`, `=true`, `=3` or a mapping, on which Hydra only raises a ValueError, and for
    `~serving.kv_tokens`: only what a class takes may be left to its defaults."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        taken = (*METHODS, "trace", "model", "cluster")  # groups whose keys are parameters of a class
        if override.is_delete() and group not in groups() and group.split(".")[0] not in taken:
            raise UserError(f"~{group}: cannot be left out; {group}=VALUE sets it")
        plain = not override.is_delete() and not override.is_add()  # +GROUP={_target_: ...} is a policy of one's own
        if plain and group in groups() and not isinstance(value, str | list):
            said = f"{group}={value if isinstance(value, dict) else _written(value)}"
            raise UserError(f"{said}: the name of an option is right ({', '.join(group_options(group))})")


def _own(error: BaseException | None) -> UserError | None:
    """The UserError that a resolver of ours raised below Hydra's."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


def _explain(message: str, overrides: Sequence[str]) -> str:
    """Hydra's error in one line, with the nearest known key or option."""
    unknown = re.search(r"Could not override '([^']+)'", message)
    if unknown:
        key = unknown.group(1)
        return _unknown(key, overrides)
    option = re.search(r"Could not find '([^/']+)/([^']+)'", message)
    if option:
        group, name = option.groups()
        return f"{group}={name}: no such option{nearest(name, group_options(group))}"
    group_key = re.search(r"[Nn]o match for '([^']+)' in the defaults list|You must specify '([^=]+)=", message)
    if group_key:
        key = group_key.group(1) or group_key.group(2)
        return _unknown(key, overrides)
    missing = re.search(r"full_key: (\S+)", message)
    if "Missing mandatory value" in message and missing:
        return f"{missing.group(1)} has no value; set it on the command line"
    return f"{message.strip().splitlines()[0]} (overrides: {' '.join(overrides)})"


def _unknown(key: str, overrides: Sequence[str]) -> str:
    """What to say of a key that the composed config lacks: an option that has it, or the nearest known key."""
    group, _, name = key.partition(".")
    options = {option: _option(group, option) for option in group_options(group)} if group in groups() else {}
    having = [option for option, tree in options.items() if name and name in tree]
    if having:
        chosen = next((word for word in reversed(overrides) if word.startswith(f"{group}=")), f"the default {group}")
        return f"{key}: {chosen} has no such key; {', '.join(f'{group}={option}' for option in having)} has it"
    known = set(groups()) | _keys(_defaults(), "")
    inside = {word for word in known if word.startswith(f"{group}.")}
    for tree in options.values():
        inside |= _keys(tree, f"{group}.")
    return f"unknown config key '{key}'{nearest(key, inside or known)}"


def _option(group: str, option: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    tree: Any = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{option}.yaml"))
    return {str(key): value for key, value in tree.items() if key != "defaults"}


def _keys(tree: Mapping[str, Any], prefix: str) -> set[str]:
    """Dotted names of all keys of a tree."""
    names = {f"{prefix}{name}" for name in tree}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            names |= _keys(value, f"{prefix}{name}.")
    return names


POLICY_GROUPS = ("placement", "predictor", "replica_router", "request_scheduler", "token_scheduler")


def list_policies() -> str:
    """Every option of the policy groups with a sentence on what it is."""
    from omegaconf import OmegaConf

    lines = []
    for group in POLICY_GROUPS:
        lines.append(f"{group}=")
        for name in group_options(group):
            target = OmegaConf.select(OmegaConf.load(conf_dir() / group / f"{name}.yaml"), "_target_")
            lines.append(f"  {name:18s} {sentence_on(target) if target else 'Nothing of this kind.'}")
    lines.append(
        "your own: GROUP._target_=my_module.MyClass (a class with the protocol's methods in the working directory)"
    )
    return "\n".join(lines)


def sentence_on(target: str) -> str:
    """The first sentence of a class's docstring; of its module's where the class starts with its parameters."""
    from hydra.utils import get_class

    found = get_class(target)
    about = " ".join((found.__doc__ or "").split())
    if not about[:1].isupper():
        about = " ".join((sys.modules[found.__module__].__doc__ or "").split())
    return re.split(r"(?<=[.])\s(?=[A-Z])", about, maxsplit=1)[0]
