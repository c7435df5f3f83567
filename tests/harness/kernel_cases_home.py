"""Body of the test of home assignment: it runs where TRITON_INTERPRET=1 was set before the kernel was imported."""

from __future__ import annotations

import numpy as np
import torch


def check_homes(cases: list[tuple[np.ndarray, int]]) -> None:
    from harness.kernels.home import home_tokens
    from semmoe.schedule.priced import priced_owners

    for score_TG, capacity in cases:
        got = home_tokens(torch.from_numpy(score_TG), capacity).numpy()
        expected = priced_owners(score_TG, capacity)
        assert (got == expected).all(), (score_TG.shape, capacity, np.flatnonzero(got != expected))
