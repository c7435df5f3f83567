"""Serving: requests and when they arrive (workload), the loop that batches them, its step plans, and what they were served.

`workload.py` makes the requests (`arrivals.py`, `request_log.py`), `loop.py` serves them: `batching.py` plans a step over
`kv_store.py` and `prefix_cache.py`. `steplog.py` keeps the plans of a run, `columns.py` makes its serving columns.
"""

from .loop import Known, ServingLoop
from .stepplan import DECODE, PREFILL, Request, ServingLimits, StepPlan, Stretch, TokenRows

__all__ = [
    "DECODE",
    "PREFILL",
    "Known",
    "Request",
    "ServingLimits",
    "ServingLoop",
    "StepPlan",
    "Stretch",
    "TokenRows",
]
