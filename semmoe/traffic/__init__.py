"""Traffic: what one batch moves between ranks, the pivot of both backends (DESIGN section 3).

`traffic.py` counts it from routes (`route_counts.py`; `wide.py` where there are many ranks) as `collective.py`s, whose rows
`ports.py` puts on the links of a `wiring.py`; `locality.py` sums many batches up in LAR, fan-out, imbalance and bytes.
"""

from .traffic import Traffic, count_trace_rows, count_traffic, differences, everywhere, rehomed, with_collectives

__all__ = [
    "Traffic",
    "count_trace_rows",
    "count_traffic",
    "differences",
    "everywhere",
    "rehomed",
    "with_collectives",
]
