"""Which rank holds which expert: the Placement type, the policy protocol, and one policy a file."""

from .base import Placement, PlacementPolicy, PlacementProblem

__all__ = ["Placement", "PlacementPolicy", "PlacementProblem"]
