"""over_ranks: what numpy says along the last axis, whatever the shape, type and memory order."""

import numpy as np
import pytest

from semmoe.traffic.over_ranks import most, total


@pytest.mark.parametrize("shape", [(5,), (7, 1), (3, 8), (2, 4, 6), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_most_and_total_are_numpys_along_the_last_axis(shape, dtype):
    values = (100 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    for turned in (values, values[::-1], np.asfortranarray(values)):
        if shape[-1]:
            np.testing.assert_array_equal(most(turned), turned.max(axis=-1))
        np.testing.assert_allclose(total(turned), turned.sum(axis=-1), rtol=1e-12)
