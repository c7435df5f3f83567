"""Arrays of every kind that a damaged or foreign .npz may hold, for tests of its readers."""

from __future__ import annotations

import numpy as np

WEIRD = {
    "object": np.array([{}, None], dtype=object),
    "float": np.array([1.5, 2.5, 3.5]),
    "nan": np.array([np.nan]),
    "text": np.array(["a", "b"]),
    "empty": np.zeros(0, dtype=complex),
    "negative": np.array([-1, -5]),
    "huge": np.array([2**62]),
    "unsigned": np.array([2**64 - 1], dtype=np.uint64),
    "complex": np.array([1j]),
    "solid": np.zeros((2, 2, 2, 2)),
    "date": np.array(["2020-01-01"], dtype="M8[D]"),
    "struct": np.zeros(2, dtype=[("a", int)]),
}
