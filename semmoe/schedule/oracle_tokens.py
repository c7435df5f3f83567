"""Oracle homes: what exact scheduling would reach if the gate's choice were known beforehand."""

from __future__ import annotations

from .semantic import Semantic


class OracleTokens(Semantic):
    """Exact homes on the true experts of the layer, which only a replay knows: the bound for token scheduling."""

    sees_routes = True
