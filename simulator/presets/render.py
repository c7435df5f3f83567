"""A cluster file as text."""

from __future__ import annotations

from typing import Any

import yaml


class _Flow(list):  # type: ignore[type-arg]
    """A list that stands on one line of YAML."""


def render(raw: dict[str, Any]) -> str:
    """YAML text: scalars first, number lists in flow style."""

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(
        _Flow, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
    )

    def flow(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: flow(value) for key, value in node.items()}
        if isinstance(node, list) and node and not isinstance(node[0], dict):
            return _Flow(node)
        return [flow(value) for value in node] if isinstance(node, list) else node

    head = "# Written by `python -m simulator.presets DATA_DIR` from public measurements; edit the script, not this file.\n"
    return head + yaml.dump(flow(raw), Dumper=Dumper, sort_keys=False, width=118, allow_unicode=True)
