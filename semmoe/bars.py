"""Progress bars."""

from __future__ import annotations

import sys
from typing import Any


def progress(total: int, what: str, unit: str = "run") -> Any:
    """A progress bar that shows itself only on a terminal and only after two seconds."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, unit=unit, delay=2, disable=not sys.stderr.isatty(), file=sys.stderr)
