"""Whether a trace that is about to be drawn fits into this machine's memory."""

from __future__ import annotations

import psutil

from ..errors import UserError

TOKEN_BYTES, REQUEST_BYTES = (
    32,
    200,
)  # beside the routes of a token: its id, request and draws; lengths and domain of a request
GIB = 2**30


def check_room(requests: int, tokens_each: int, layers: int, top_k: int) -> None:
    """UserError where that many requests and tokens (mean length) have no room; the system would end the process silently."""
    wanted = requests * (REQUEST_BYTES + tokens_each * (TOKEN_BYTES + 4 * layers * top_k))
    free = psutil.virtual_memory().available
    if wanted > free:
        raise UserError(
            f"trace: {requests} requests of {tokens_each} tokens in {layers} layers need {wanted / GIB:.0f} GiB to draw, "
            f"{free / GIB:.0f} GiB are free; use fewer requests (trace.requests) or shorter ones"
        )
