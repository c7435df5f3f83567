"""Home assignment on the device gives the homes of its reference, which the simulator runs, to the last token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import kernel_cases_home
import numpy as np
from kernel_cases import on_rank_zero
from rank_processes import rank_processes

sys.path.append(str(Path(__file__).resolve().parents[1] / "semmoe"))
from home_scores import KINDS, scores


def test_the_kernel_gives_the_homes_of_the_reference() -> None:
    """Random, skewed, clustered, tied and equal scores; tight and loose capacity; several chunks (24 ranks)."""
    cases = [(scores(kind, 60, 8), 8) for kind in KINDS]  # tight
    cases += [(scores(kind, 280, 24), 14) for kind in ("skewed", "equal")]  # loose, two chunks
    cases += [(scores("random", tokens, ranks), -(-tokens // ranks)) for tokens, ranks in ((1, 8), (7, 3), (64, 1))]
    negative = (np.array([[-5, -9], [-5, -70000], [3, -2]], dtype=np.int32), 2)
    rank_processes().run(on_rank_zero, kernel_cases_home.check_homes, (cases + [negative],))
