"""`torchrun --nproc-per-node N -m harness measure [key=value ...]`: rank 0 runs the command line, the others follow."""

from __future__ import annotations

import os
import sys

from semmoe import cli
from semmoe.errors import UserError
from semmoe.plugins import add_working_directory

from .torchrun import TorchrunPool, follow, is_follower, under_torchrun


def main() -> int:
    """Exit status of this rank; without torchrun it is the plain command line."""
    add_working_directory()
    if is_follower():
        try:
            follow()
        except UserError as error:
            print(f"harness: {error}", file=sys.stderr)
            return 2
        return 0
    status = cli.main()
    if status == 0 and under_torchrun() and not TorchrunPool.opened:
        TorchrunPool(int(os.environ["WORLD_SIZE"])).close()  # nothing was to be done: let the others go
    return status


if __name__ == "__main__":
    sys.exit(main())
