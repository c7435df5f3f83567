"""Ranks that torchrun started: rank 0 runs the command line, the others follow.

    torchrun --nproc-per-node 8 -m harness experiment=NAME      preflight, measure, compare
    torchrun --nproc-per-node 8 -m harness measure key=value    any command of semmoe

Several machines: one agent each, with transport=collective:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m harness experiment=NAME

The rows carry the config ids of `semmoe simulate experiment=NAME`; rows that it left in the run's folder are compared too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from semmoe import cli
from semmoe.errors import UserError
from semmoe.plugins import add_working_directory

from .torchrun import TorchrunPool, follow, is_follower, under_torchrun


def main() -> int:
    """Exit status of this rank; without torchrun it is the plain command line."""
    add_working_directory()
    try:
        if is_follower():
            follow()
            return 0
    except UserError as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    words = sys.argv[1:]
    status = cli.main(["measure", *words] if is_experiment(words) else words)
    if status == 0 and under_torchrun() and not TorchrunPool.opened:
        TorchrunPool(int(os.environ["WORLD_SIZE"])).close()  # nothing was to be done: let the others go
    if status == 0 and is_experiment(words):
        status = cli.main(["compare", run_folder(words)])
    return status


def is_experiment(words: Sequence[str]) -> bool:
    """Whether only overrides are given, no command."""
    return bool(words) and all(is_override(word) or word in ("-m", "--multirun") for word in words)


def is_override(word: str) -> bool:
    """key=value, +key=value, or ~group, which Hydra takes away."""
    return "=" in word or word.startswith("~")


def run_folder(words: Sequence[str]) -> str:
    """Where the rows of these overrides lie."""
    from semmoe.config import compose_all
    from semmoe.session import folder_of

    return str(folder_of(compose_all([word for word in words if is_override(word)], True)[0]))


if __name__ == "__main__":
    sys.exit(main())
