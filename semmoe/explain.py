"""What `semmoe COMMAND --help` prints: every group with its options, every key with its meaning, from the config tree."""

from __future__ import annotations

import textwrap

from .config import conf_dir, group_options, groups

WIDTH = 110


def explain_command(command: str, about: str) -> str:
    """Help of a command that takes the config's keys. about: what it does, in a sentence or two."""
    lines = [f"semmoe {command} [-m] [key=value ...]", "", *textwrap.wrap(" ".join(about.split()), WIDTH), ""]
    lines.append("Groups (GROUP=OPTION; GROUP.KEY=VALUE sets a key of the option, +GROUP.KEY=VALUE adds one):")
    for group in groups():
        options = ", ".join(group_options(group))
        lines += textwrap.wrap(f"{group:18s} {options}", WIDTH, initial_indent="  ", subsequent_indent=" " * 21)
    lines += ["", "Keys and their defaults (KEY=VALUE; those of an indented block as BLOCK.KEY=VALUE):"]
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    lines += [f"  {line}".rstrip() for line in text[text.index("\nname:") + 1 :].splitlines()]
    return "\n".join(lines)
