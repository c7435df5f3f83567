"""Who goes where at run time: request schedulers (attention-DP) and token schedulers (attention-TP), one a file."""

from .base import Plan, RankStates, RequestScheduler, TokenScheduler

__all__ = ["Plan", "RankStates", "RequestScheduler", "TokenScheduler"]
