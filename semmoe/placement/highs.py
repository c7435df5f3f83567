"""scipy's milp, once more without presolve where HiGHS ends with a solve error.

HiGHS does so on a few small programs whose numbers nearly tie, such as
moetuner._cluster_program([13, 10, 4, 6, 1, 7, 8, 11, 4], 3 clusters).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import milp

SOLVE_ERROR = 4


def solve_milp(cost: np.ndarray, *, options: dict[str, Any], **program: Any) -> Any:
    """scipy.optimize.milp(cost, ...) with its arguments and its answer."""
    answer = milp(cost, options=options, **program)
    if answer.status == SOLVE_ERROR:
        answer = milp(cost, options=options | {"presolve": False}, **program)
    return answer
