"""Which experts (and so which rank) a token will ask for: the predictor protocol, one predictor a file."""

from .base import ExpertPredictor, Predictor, quantise

__all__ = ["ExpertPredictor", "Predictor", "quantise"]
